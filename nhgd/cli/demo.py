"""`nhgd demo`."""

from nhgd.cli.options import Json


def demo(as_json: Json = False) -> None:
    """x"""
