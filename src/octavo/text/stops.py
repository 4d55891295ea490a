"""Stop strings looked for character by character, all at once (Aho and Corasick, 1975)."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An automaton over a set of non-empty stop strings: a state is the longest end of the text that begins one.

    `advance` takes a state and a character to the next state, 0 being the start. `depth` of a state is
    the length of that end, so the last `depth` characters of a text may still turn into a match.
    `match` of a state is the length of the longest stop string that ends here, or 0.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.depth = [0]
        self.match = [0]
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the state of the longest proper end that begins a stop string as well
        for word in words:
            self._add(word)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self.match[state] = self.match[state] or self.match[self._shorter[state]]
            for character, following in self._next[state].items():
                self._shorter[following] = self.advance(self._shorter[state], character)
                waiting.append(following)

    def advance(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if state == 0:
                return 0
            state = self._shorter[state]
        return self._next[state][character]

    def _add(self, word: str) -> None:
        state = 0
        for character in word:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.match.append(0)
                self.depth.append(self.depth[state] + 1)
            state = self._next[state][character]
        self.match[state] = len(word)
