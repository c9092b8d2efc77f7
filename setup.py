"""Packaging: `hetpipe/`, `partitioners/`, `models/` install as hetpipe, hetpipe.partitioners, hetpipe.models.

Entry points by which another package adds a part of its own, found by name (`hetpipe/planning/registry.py`):

    hetpipe.partitioners   name = package.module:Partitioner   a planning algorithm
    hetpipe.models         name = package.module:build         returns an nn.Sequential
    hetpipe.datasets       name = package.module:function      returns a hetpipe.DataSplits
    hetpipe.observers      name = package.module:Observer      a hetpipe.Observer of each run
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """The version, read from the source: importing it here would need the dependencies."""
    source = (ROOT / "hetpipe" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if found is None:
        raise RuntimeError('hetpipe/__init__.py has no line __version__ = "…"')
    return found[1]


def long_description() -> str:
    """README.md, where there is one."""
    readme = ROOT / "README.md"
    return readme.read_text("utf-8") if readme.exists() else ""


setup(
    name="hetpipe",
    version=version(),
    description="Unequal pipeline and data parallelism for PyTorch on unequal devices.",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The hetpipe contributors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["deep learning", "pipeline parallelism", "data parallelism", "heterogeneous GPUs", "PyTorch", "fine-tuning"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {release}" for release in ("3", "3.11", "3.12", "3.13")),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["hetpipe", "hetpipe.*"]),
        "hetpipe.partitioners",
        *(f"hetpipe.partitioners.{room}" for room in find_packages("partitioners")),
        "hetpipe.models",
    ],
    package_dir={"hetpipe.partitioners": "partitioners", "hetpipe.models": "models"},
    package_data={
        "hetpipe": ["py.typed"],
        "hetpipe.show": ["glossary.md"],
        "hetpipe.show.page": ["style.css", "script.js"],
        "hetpipe.diffusion": ["kinds.yaml", "popular.yaml"],
        "hetpipe.documents": ["guesses.yaml"],
        "hetpipe.exchange.configs": ["axolotl.yaml", "llamafactory.yaml"],
        "hetpipe.whatif": ["cards.yaml", "popular.yaml", "zorse.json", "zorse-LICENSE.txt"],
        "hetpipe.models": ["README.md"],
    },
    install_requires=[
        "torch>=2.8",
        "numpy>=2",
        "highspy>=1.10",
        "numba>=0.65",
        "pydantic>=2.7",
        "PyYAML>=6",
        "typer>=0.12",
        "rich>=13",
        "safetensors>=0.5",
        "filelock>=3.12",
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "import-linter>=2.3",
            "types-PyYAML",
            "scipy>=1.13",  # for bench/
            "matplotlib>=3.9",  # for bench/
            "playwright>=1.50",  # drives a Chromium that is there already, to look at reports
        ],
        "loggers": ["tensorboard>=2.16", "wandb>=0.17", "mlflow-skinny>=3"],  # log.to of a job
        "viz": ["resvg_py>=0.5"],  # turns SVG into PNG
        "hf": ["transformers>=5"],
        "lora": ["transformers>=5", "peft>=0.18", "bitsandbytes>=0.49"],
        "text": ["transformers>=5", "jinja2>=3.1", "datasets>=3"],
        "diffusion": ["diffusers>=0.36", "accelerate>=1"],
        "pipes": ["fairscale==0.4.13", "torchgpipe==0.0.7"],
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=1.0"],
        "trainers": ["accelerate>=1.15", "lightning>=2.6", "transformers>=5", "trl>=1.16"],
    },
    entry_points={"console_scripts": ["hetpipe = hetpipe.__main__:main"]},
    zip_safe=False,
)
