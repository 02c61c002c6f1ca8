"""The YAML that paceline writes, read back by PyYAML."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.manifests import format_documents

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[clusters]'")

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["no", "On", "1e3", "0x1f", "1:30", "2026-11-23", "~", "null", "=", "- a", "a: b", "a #b", " a", "a\nb", "a\nb\n",
     "a\n\nb", "a\n b\n", "\na", "a\n\n", "a \nb", "a\n ", "\t", "a\n\tb", "%d",
     "@x", "`x`", "---", "...", "a\n---\nb", "'", '"', "\\"]
)  # fmt: skip
KEYS = TEXTS.filter(lambda key: not key.startswith("#"))
SCALARS = TEXTS | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_a_reader_gets_the_same_values(values):
    assert yaml.safe_load(format_documents([values])) == values


@given(st.lists(st.dictionaries(KEYS, SCALARS, min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_file_may_have_several_documents(documents):
    assert list(yaml.safe_load_all(format_documents(documents))) == documents


def test_it_reads_as_a_person_would_write_it():
    script = "set -e\n\nif true; then\n  echo yes\nfi\n"
    env = [{"name": "A", "value": "1"}]
    values = {"# the job": None, "name": "books", "args": ["-c", script], "env": env, "rest": {}}
    assert format_documents([values, {"kind": "Secret"}]) == (
        '# the job\nname: books\nargs:\n  - "-c"\n  - |\n    set -e\n\n    if true; then\n      echo yes\n    fi\n'
        'env:\n  - name: A\n    value: "1"\nrest: {}\n---\nkind: Secret\n'
    )


def test_what_has_no_form_is_an_error():
    with pytest.raises(TypeError):
        format_documents([{"a": 1.5}])
