"""The tests of this folder run in virtual time."""

from tests.testing.virtual_time import pytest_itemcollected

__all__ = ["pytest_itemcollected"]
