"""Novelty: whether a program repeats an earlier one, and which.

    index = NoveltyIndex(NoveltyConfig())
    repeated = index.find(code=code_hash(text, language="python"), embedding=vector)
    if repeated is None:
        index.add("p7", code=code_hash(text, language="python"), embedding=vector)

`find` checks the given hash and embedding. Embeddings are compared with the newest `num_compared`
programs, so the cost does not grow with the run.
"""

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
from pydantic import Field

from rookery.config import Config

__all__ = ["NoveltyConfig", "NoveltyIndex", "Repetition", "code_hash", "text_hash"]


class NoveltyConfig(Config):
    """Limits of what counts as a repetition."""

    similarity_threshold: float = Field(default=0.99, gt=0, le=1)
    """Reject a program whose embedding has at least this cosine with another's."""
    num_compared: int = Field(default=1000, ge=1)
    """Newest programs whose embeddings are compared."""
    num_later: int = Field(default=0, ge=0)
    """Further embeddings kept, so that `find` can ignore as many that were added later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Why a program is not new: `Repetition(kind="code", of="p3")`."""

    kind: Literal["code", "embedding"]
    of: str
    """Id of the repeated program."""
    similarity: float = 1.0
    """Cosine of the embeddings; 1 for equal code."""


class NoveltyIndex:
    """The hashes of all added programs, and the embeddings of the newest."""

    def __init__(self, config: NoveltyConfig) -> None:
        self._config = config
        self._codes: dict[str, str] = {}
        """{hash: id of the first program with it}."""
        self._embedded: list[str] = []
        self._vectors = np.zeros((0, 0), dtype=np.float32)
        self._num_kept = config.num_compared + config.num_later
        self.num_embedded = 0
        """Programs added with an embedding so far."""

    def find(
        self,
        *,
        code: str | None = None,
        embedding: Sequence[float] | None = None,
        num_known: int | None = None,
    ) -> Repetition | None:
        """Return the program that this one repeats, or None if it is new.

        With `num_known`, the embedding is compared only with the first so many embedded programs,
        as when `num_embedded` had that value.
        """
        if code is not None and code in self._codes:
            return Repetition(kind="code", of=self._codes[code])
        return None if embedding is None else self._find_similar(embedding, num_known)

    def can_compare(self, embedding: Sequence[float]) -> bool:
        """Whether the embedding has the dimension of the earlier ones. If not, it is never similar
        to them, and adding it is an error."""
        return not self._embedded or len(embedding) == self._vectors.shape[1]

    def add(
        self,
        id: str,
        *,
        code: str | None = None,
        embedding: Sequence[float] | None = None,
    ) -> None:
        """Remember the program; of equal ones, `find` names the first."""
        if code is not None:
            self._codes.setdefault(code, id)
        if embedding is not None:
            self._add_embedding(id, embedding)

    def _find_similar(self, embedding: Sequence[float], num_known: int | None) -> Repetition | None:
        end = self.num_embedded if num_known is None else min(num_known, self.num_embedded)
        begin = max(end - self._config.num_compared, self.num_embedded - len(self._embedded))
        if begin >= end or not self.can_compare(embedding):
            return None
        cosines = self._vectors[: len(self._embedded)] @ _unit(embedding)
        places = np.arange(begin, end) % self._num_kept
        nearest = int(places[np.argmax(cosines[places])])
        similarity = min(1.0, float(cosines[nearest]))
        if similarity < self._config.similarity_threshold:
            return None
        return Repetition(kind="embedding", of=self._embedded[nearest], similarity=similarity)

    def _add_embedding(self, id: str, embedding: Sequence[float]) -> None:
        """Store in a ring: the newest replaces the oldest."""
        vector = _unit(embedding)
        if not len(self._vectors):
            self._vectors = np.zeros((self._num_kept, len(vector)), dtype=np.float32)
        place = self.num_embedded % self._num_kept
        self._embedded[place : place + 1] = [id]
        self._vectors[place] = vector
        self.num_embedded += 1


def code_hash(code: str, *, language: str) -> str:
    """Return a hash that is equal for programs that differ only in layout and comments.

    Python is compared by its syntax tree. Other languages, and Python that does not parse, are
    compared by their text with white space normalised. Takes milliseconds for a long program: call
    it in a thread or a worker.
    """
    if language == "python":
        try:
            parts: list[str] = []
            _walk(ast.parse(code), parts)
            return text_hash("python " + " ".join(parts))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # too deep or not Python: compare its text
    return text_hash("text " + " ".join(code.split()))


def _walk(value: object, parts: list[str]) -> None:
    """Collect what `ast.dump` prints, in half of its time."""
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        for name in value._fields:
            _walk(getattr(value, name, None), parts)
        parts.append(")")
    elif isinstance(value, list):
        parts.append("[")
        for item in value:
            _walk(item, parts)
        parts.append("]")
    else:
        parts.append(repr(value))


def text_hash(text: str) -> str:
    """Return a hash of the exact text, such as a program's output."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _unit(embedding: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    vector = np.array(embedding, dtype=np.float64)
    norm = float(np.linalg.norm(vector))
    if vector.ndim != 1 or not 0 < norm < math.inf:
        raise ValueError(
            f"Got an embedding of shape {vector.shape} and length {norm}: "
            "it is a list of finite numbers that are not all 0."
        )
    return (vector / norm).astype(np.float32)
