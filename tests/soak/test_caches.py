"""The rows of `tests/soak/caches.py`, which prints them, each with what is expected."""

import pytest

from dflash_jax.kernels.native.build import library
from tests.soak import caches
from tests.soak.caches import Caches

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not library(), reason=f"there are no native kernels: {library().reason}"),
]
COMPILERS = 5  # for four sources, and to link
AGAIN = "kernels; then kernels"
EXPECTED = {
    "library planted in a folder of nobody": "not executed; kernels of a private folder",
    "library planted by nobody, folder 1777": "not executed; kernels of a private folder",
    "library planted, folder 777": "not executed; kernels of a private folder",
    "library cut in half": AGAIN,
    "library empty": AGAIN,
    "library that all may write": AGAIN,
    "library that is a link": "replaced; kernels",
    "process that compiles killed": "no child was left",
    "compiler killed": "no child was left",
    "XLA's programs, folder 1777": "another folder is used; 0 programs in it",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Caches:
    return Caches(tmp_path_factory.mktemp("caches"))


@pytest.mark.parametrize("title", EXPECTED)
def test_attacks_and_accidents_cost_a_compilation_at_most(made: Caches, title: str) -> None:
    if title not in caches.rows(made):
        pytest.skip("there is no other user for a user other than root")
    assert caches.rows(made)[title]() == EXPECTED[title]


def test_prompts_are_the_user_s(made: Caches) -> None:
    assert made.prefixes(0o755).startswith("the user alone can read the entries")
    assert made.prefixes(0o777).startswith("nothing is written: PlanError")


def test_eight_processes_share_a_compilation(made: Caches) -> None:
    """The stub's output cannot be loaded, which each process reports; none compiles it again."""
    assert made.first_use() == f"{COMPILERS} compilers started; no child was left"
