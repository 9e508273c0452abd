"""The adapter of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.errors import InvalidParameter

MAX_NAME_LEN: Final = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, by name; it is loaded with the first request that gives its path.

    Args:
        lora_name: name of the adapter, at most 256 characters.
        lora_int_id: any positive number; vLLM identifies adapters by it, Quire by their names.
        lora_path: folder of the adapter; "" for a loaded adapter.
        load_inplace: True to read the folder again, even if an adapter of this name is already loaded.

    Raises:
        InvalidParameter: a value is not allowed; the message names the field.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    load_inplace: bool = False

    def __post_init__(self) -> None:
        name, path = self.lora_name, self.lora_path
        if type(name) is not str or not 0 < len(name) <= MAX_NAME_LEN:
            raise InvalidParameter("lora_name", name, f"a string of 1 to {MAX_NAME_LEN} characters")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise InvalidParameter("lora_int_id", self.lora_int_id, "a positive integer")
        if type(path) is not str or "\0" in path:
            raise InvalidParameter("lora_path", path, "a text, the path of a folder")
        if type(self.load_inplace) is not bool:
            raise InvalidParameter("load_inplace", self.load_inplace, "true or false")
        if self.load_inplace and not self.lora_path:
            raise InvalidParameter("lora_path", self.lora_path, "the path of a folder, with load_inplace")
