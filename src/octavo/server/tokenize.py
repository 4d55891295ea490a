"""/tokenize, /detokenize and /tokenizer_info: text to token ids and back, as the engine does it."""

from fastapi import Request
from starlette.responses import JSONResponse, Response

from octavo.engine.inputs import parse
from octavo.errors import InvalidRequest, shown
from octavo.server.json_body import Router
from octavo.server.protocol import DetokenizeBody, TokenizeBody
from octavo.server.serving import off_loop, serving_of
from octavo.server.sse import encode

router = Router(tags=["Tokenizer"])


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of messages."""
    serving = serving_of(request)
    info = serving.info()
    serving.model(body.model)
    unread: tuple[str, ...] = ()
    if body.prompt is not None:
        text, special = body.prompt, True
    else:
        (text, unread), special = await serving.chat_prompt(body), False
    headers = serving.headers(body, unread)
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    ids = await serving.encode(text, special, may_be_longer=True)
    tokenizer = serving.engine.tokenizer
    strings = None
    if body.return_token_strs:
        texts = {token_id: tokenizer.token_text(token_id) for token_id in set(ids)}
        strings = [texts[token_id] for token_id in ids]
    content = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": strings}
    return Response(encode(content), headers=headers, media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Text of token ids."""
    serving = serving_of(request)
    info = serving.info()
    serving.model(body.model)
    headers = serving.headers(body)
    if not isinstance(body.tokens, list):
        raise InvalidRequest(
            f"tokens={shown(body.tokens)} is not allowed: it must be a list of token ids.", param="tokens"
        )
    try:
        ids = parse(body.tokens).token_ids or ()
    except InvalidRequest as error:
        raise InvalidRequest(error.message, error.hint, "tokens") from None
    wrong = next((token_id for token_id in ids if not 0 <= token_id < info.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"Token id {shown(wrong)} is outside the vocabulary: ids are 0 to {info.vocab_size - 1}.", param="tokens"
        )
    text = await off_loop(len(ids), serving.engine.tokenizer.decode, ids, body.skip_special_tokens)
    return Response(encode({"prompt": text}), headers=headers, media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> JSONResponse:
    """Special tokens and chat template, for clients that tokenize or render by themselves."""
    serving = serving_of(request)
    info = serving.info()
    tokenizer = serving.engine.tokenizer
    templates = tokenizer.chat_templates
    return JSONResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": info.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            **tokenizer.special_tokens,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "chat_template": serving.chat_template or templates.get("default"),
        }
    )
