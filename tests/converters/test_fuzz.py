import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import exercise, measured, mutated, seeds

EXAMPLES = 150  # the soak run does 100 000
ALLOWED = {"read", "CheckpointError", "ConfigError", "TokenizerError"}


def test_the_seeds_are_valid(tmp_path):
    for seed in seeds(tmp_path):
        (tmp_path / seed.name).write_bytes(seed.raw)
        assert exercise(tmp_path / seed.name)[0] == "read", seed.name


@pytest.mark.filterwarnings("ignore::UserWarning")  # of files that are read with a warning
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_mutated_file_is_read_or_refused_by_name(tmp_path_factory, index):
    folder = tmp_path_factory.mktemp("fuzz")
    seed = seeds(folder)[index]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(raw=mutated(seed), traced=st.sampled_from([True, False, False, False]))
    def check(raw, traced):
        path = folder / seed.name
        path.write_bytes(raw)
        outcome, seconds, peak = measured(path) if traced else (*exercise(path), 0)
        assert outcome in ALLOWED
        assert seconds < 1.0
        assert peak < 64 << 20

    check()
