"""The communication of a negotiation, on the process set's own group."""

from __future__ import annotations

import torch

from mpicomm.horovod.group_calls import GroupCalls

_WORD_BYTES = 8


class GroupExchange:
    """Exchanges small values between the ranks of a group. Every method is collective."""

    def __init__(self, calls: GroupCalls) -> None:
        self._calls = calls
        self._memory = bytearray()
        self._words = torch.empty(0, dtype=torch.int64)

    def bitwise_and(self, value: int, num_words: int) -> int:
        """Return the AND of the values, of 64 * num_words bits, of all ranks (collective)."""
        num_bytes = _WORD_BYTES * num_words
        if len(self._memory) != num_bytes:
            self._memory = bytearray(num_bytes)
            self._words = torch.frombuffer(self._memory, dtype=torch.int64)
        self._memory[:] = value.to_bytes(num_bytes, "little")
        self._calls.bitwise_and(self._words)
        return int.from_bytes(self._memory, "little")

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks (collective)."""
        data = bytearray(text.encode())
        sizes = self.all_gather_numbers([len(data)])
        longest = max(size for (size,) in sizes)
        data.extend(bytes(longest - len(data)))
        received = torch.empty(len(sizes) * longest, dtype=torch.uint8)
        self._calls.all_gather(received, torch.frombuffer(data, dtype=torch.uint8))
        whole = received.numpy().tobytes()
        return [whole[rank * longest :][:size].decode() for rank, (size,) in enumerate(sizes)]

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of all ranks, which are equally many (collective)."""
        received = torch.empty(self._calls.size, len(numbers), dtype=torch.int64)
        self._calls.all_gather(received.view(-1), torch.tensor(numbers, dtype=torch.int64))
        return received.tolist()

    def all_to_all_numbers(self, numbers: list[list[int]]) -> list[list[int]]:
        """Send each rank a list of numbers and return the lists of all ranks, which are equally long (collective)."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        received = torch.empty_like(mine)
        self._calls.all_to_all(received, mine)
        return received.tolist()
