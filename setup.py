"""The description of the package on an index: the README without links into the repository, which lead nowhere there."""

import re
from pathlib import Path

from setuptools import setup


def describe(readme: str) -> str:
    """Return a README with pictures left out and relative links replaced by their text."""
    readme = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", readme)


setup(
    long_description=describe((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
