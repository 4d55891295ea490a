"""Who owns which KV block, and which blocks can be found by their content. Block ids in, block ids out."""

from array import array
from collections import Counter, OrderedDict
from hashlib import blake2b
from itertools import takewhile

from octavo.core.events import CacheReset, Evicted, Subscriber
from octavo.errors import InvalidConfig


def chain_hash(parent: bytes, tokens: list[int]) -> bytes:
    """16 bytes that stand for a full block together with everything before it."""
    digest = blake2b(parent, digest_size=16)
    digest.update(array("I", tokens))
    return digest.digest()


class BlockPool:
    """A fixed set of blocks with reference counts, where freed blocks stay findable by content.

    Content is a full block's tokens and all before them, or as much of a block as a prompt's end fills: that
    is copied, not shared, since its block goes on being filled.

    Block 0 is never handed out: padding and surplus positions are written there. A block that is free
    is either empty or cached (findable); empty ones are taken first, then the cached one that was freed
    longest ago. A block in use may carry the hash of what it holds (sealed) or of what it is about to
    hold (promised). `check` states all of it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 1:
            raise InvalidConfig(
                f"A pool of num_blocks={num_blocks} blocks of block_size={block_size} positions holds nothing: "
                "at least 2 blocks (one is kept for padding) of at least 1 position are needed."
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.subscribers: list[Subscriber] = []
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._promised: dict[bytes, int] = {}
        self._num_resets = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still give, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that can be found by content."""
        return len(self._cached)

    def seed(self, namespace: str) -> bytes:
        """The parent hash of a first block. It differs by namespace and changes with every reset."""
        return chain_hash(namespace.encode("utf-8", "surrogatepass"), [self._num_resets])

    def match(self, hashes: list[bytes]) -> list[int]:
        """The longest findable prefix. Changes nothing; `acquire` keeps it."""
        return [self._block_of[h] for h in takewhile(self._block_of.__contains__, hashes)]

    def find(self, content_hash: bytes) -> int | None:
        """The block with this content, free or in use. Changes nothing."""
        return self._block_of.get(content_hash)

    def num_free_without(self, blocks: list[int]) -> int:
        """Free blocks that would be left if `blocks` were acquired."""
        return self.num_free - sum(not self._refs[block] for block in blocks)

    def acquire(self, blocks: list[int]) -> None:
        """Take one more reference to each findable block."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with nothing in them, or none at all."""
        if count > len(self._empty) + len(self._cached):
            return None
        blocks = [self._empty.pop() for _ in range(min(count, len(self._empty)))]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def promise(self, block: int, content_hash: bytes) -> None:
        """Announce what a block in use will hold, so that others wait for it instead of computing it too."""
        if content_hash not in self._block_of and content_hash not in self._promised:
            self._hash_of[block] = content_hash
            self._promised[content_hash] = block

    def is_promised(self, content_hash: bytes) -> bool:
        return content_hash in self._promised

    def seal(self, block: int, content_hash: bytes) -> None:
        """Make a block findable by its content; what it held before is part of that. The first with a content wins."""
        promiser = self._promised.pop(content_hash, None)
        if promiser is not None:
            del self._hash_of[promiser]
        if content_hash not in self._block_of:
            if (before := self._hash_of.get(block)) is not None:
                del self._block_of[before]
            self._hash_of[block] = content_hash
            self._block_of[content_hash] = block

    def release(self, blocks: list[int]) -> None:
        """Drop one reference each, last block first, so that tails are evicted before heads."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            content_hash = self._hash_of.get(block)
            if content_hash in self._block_of:
                self._cached[block] = None
                continue
            if content_hash is not None:
                del self._hash_of[block], self._promised[content_hash]
            self._empty.append(block)

    def forget(self, hashes: list[bytes]) -> None:
        """Content that must not be found any more (it came from a computation that went wrong)."""
        for content_hash in hashes:
            block = self._block_of.pop(content_hash, None)
            if block is None:
                continue
            del self._hash_of[block]
            if not self._refs[block]:
                del self._cached[block]
                self._empty.append(block)

    def reset_cache(self) -> None:
        """Forget all content. Blocks in use stay with their users; what those seal later is never hit."""
        self._num_resets += 1
        self._empty.extend(self._cached)
        for known in (self._cached, self._hash_of, self._block_of, self._promised):
            known.clear()
        for tell in self.subscribers:
            tell(CacheReset())

    def clear(self) -> None:
        """Take every block back, whoever has it, and forget all content."""
        self.reset_cache()
        self._refs = [0] * self.num_blocks
        self._empty = list(range(self.num_blocks - 1, 0, -1))

    def check(self) -> None:
        """Raise RuntimeError, naming what is wrong, unless the books balance."""
        free = [*self._empty, *self._cached]
        unused = {block for block in range(1, self.num_blocks) if self._refs[block] == 0}
        rules = {
            "block 0 belongs to nobody": self._refs[0] == 0 and 0 not in self._hash_of,
            "no reference count is negative": min(self._refs) >= 0,
            "a block is free exactly when nobody refers to it": len(free) == len(unused) and set(free) == unused,
            "a free block is cached exactly when it has a hash": all(b in self._hash_of for b in self._cached)
            and not any(b in self._hash_of for b in self._empty),
            "no content is both findable and promised": self._block_of.keys().isdisjoint(self._promised),
            "every hash leads to its block": {b: h for h, b in [*self._block_of.items(), *self._promised.items()]}
            == self._hash_of,
            "every hash has a block of its own": len(self._block_of) + len(self._promised) == len(self._hash_of),
            "a promised block is in use": all(self._refs[b] for b in self._promised.values()),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise RuntimeError("The block pool is inconsistent. Broken: " + "; ".join(broken))

    def check_references(self, held: list[int]) -> None:
        """Raise RuntimeError unless each block is referred to as often as it stands in `held`."""
        counts = Counter(held)
        if wrong := [b for b, refs in enumerate(self._refs) if refs != counts[b]]:
            raise RuntimeError(f"The block pool is inconsistent: blocks {wrong} have references that nobody holds.")

    def _evict(self, count: int) -> list[int]:
        blocks = [self._cached.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            del self._block_of[self._hash_of.pop(block)]
        for tell in self.subscribers:
            tell(Evicted(tuple(blocks)))
        return blocks
