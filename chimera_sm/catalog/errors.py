"""A name that the catalogue does not know, with the nearest one that it does."""

from __future__ import annotations

from chimera_sm.errors import UsageError


class UnknownName(UsageError):
    def __init__(self, what: str, value: str, nearest: str | None, otherwise: str):
        self.value = value
        self.nearest = nearest
        super().__init__(f"{value!r} is no {what}", fix=f"did you mean {nearest}?" if nearest else otherwise)


class UnknownInstance(UnknownName):
    def __init__(self, value: str, nearest: str | None):
        super().__init__(
            "instance type of the catalogue", value, nearest, "chimera_sm.catalog.instance_types() lists them"
        )


class UnknownRegion(UnknownName):
    def __init__(self, value: str, nearest: str | None):
        super().__init__("AWS region of the catalogue", value, nearest, "chimera_sm.catalog.regions() lists them")


class UnknownTier(UnknownName):
    def __init__(self, value: str, nearest: str | None, known: tuple[str, ...]):
        super().__init__("tier of FSx for Lustre", value, nearest, f"one of {', '.join(known)}")


class NoImage(UsageError):
    """No default image exists for what was asked; `target.image` names one."""
