"""What all requests and answers share: no other fields, and times of one form."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")]


class Strict(BaseModel):
    """A model without other fields."""

    model_config = ConfigDict(extra="forbid")
