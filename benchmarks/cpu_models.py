"""A GGUF file in the forms that peers on a CPU read: GGUF in F16 or BF16, or a folder of safetensors."""

import os
from pathlib import Path
from typing import Any


def gguf_as(source: Path, target: Path, kind: str) -> Path:
    """`target`, written where it is not there yet; `kind` is F16 or BF16."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    wanted, plain = GGMLQuantizationType[kind], GGMLQuantizationType.F32
    reader, partial = GGUFReader(source), target.with_suffix(".part")
    writer = GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = int(LlamaFileType[f"MOSTLY_{kind}"]) if name == "general.file_type" else field.contents()
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    for tensor in reader.tensors:
        if tensor.tensor_type == plain:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            numbers = quantize(dequantize(tensor.data, tensor.tensor_type), wanted)
            writer.add_tensor(tensor.name, numbers, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)
    return target


def plain_model(source: Path, dtype: Any) -> Any:
    """transformers' model of a GGUF file with plain weights of that torch type, as transformers keeps them packed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from octavo.formats.gguf import GGUFFile
    from octavo.weights.gguf import gguf_tensors

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(dict(gguf_tensors(GGUFFile(source), dtype)), strict=False)
    model.tie_weights()
    return model.eval()


def folder_of(source: Path, target: Path) -> Path:
    """`target` with safetensors in bfloat16, configuration and tokenizer, written where it is not there yet."""
    if (target / "tokenizer.json").exists():
        return target
    import torch
    from transformers import AutoTokenizer

    plain_model(source, torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    return target
