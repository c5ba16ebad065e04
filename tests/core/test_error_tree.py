"""The exception tree: who descends from whom, and what survives a pickle."""

from __future__ import annotations

import pickle

import pytest

from attnplug import errors
from attnplug.core import LayerSpec, Reason
from attnplug.core import errors as core_errors

PARENTS = {
    "AttnplugError": Exception,
    "SpecError": ValueError,
    "BatchError": ValueError,
    "LayoutError": ValueError,
    "PolicyError": ValueError,
    "UnknownBackendError": (errors.PolicyError, LookupError),
    "ModelConfigError": ValueError,
    "MatrixFileError": ValueError,
    "BackendFaultError": errors.AttnplugError,
    "RankFailureError": errors.AttnplugError,
    "PluginError": errors.AttnplugError,
    "NoBackendError": errors.AttnplugError,
    "BackendUnavailableError": errors.NoBackendError,
}
ARGUMENT_ERRORS = [
    errors.SpecError,
    errors.BatchError,
    errors.LayoutError,
    errors.PolicyError,
    errors.UnknownBackendError,
]


def test_the_tree_is_complete_and_stands_under_both_names() -> None:
    assert set(errors.__all__) == set(core_errors.__all__) == set(PARENTS)
    for name in errors.__all__:
        assert getattr(errors, name) is getattr(core_errors, name)


@pytest.mark.parametrize("name", PARENTS)
def test_every_error_descends_from_the_root_and_its_parent(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.AttnplugError)
    parents = PARENTS[name]
    for parent in parents if isinstance(parents, tuple) else (parents,):
        assert issubclass(error, parent)
    assert name in str(core_errors.__doc__)


@pytest.mark.parametrize("kind", ARGUMENT_ERRORS)
@pytest.mark.parametrize("remedy", [None, "do this"])
def test_an_argument_error_names_argument_value_limit_and_remedy(
    kind: type[errors.SpecError], remedy: str | None
) -> None:
    error = kind("head_size", 80, "must be 64", remedy)
    assert str(error) == "head_size=80 must be 64" + ("; do this" if remedy else "")
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert type(same) is kind
        assert (same.field, same.value, same.limit, same.remedy) == ("head_size", 80, "must be 64", remedy)
        assert str(same) == str(error)


@pytest.mark.parametrize("kind", [errors.AttnplugError, errors.ModelConfigError, errors.PluginError])
def test_a_plain_error_survives_a_pickle(kind: type[Exception]) -> None:
    read = pickle.loads(pickle.dumps(kind("what happened")))
    assert (type(read), str(read)) == (kind, "what happened")


def test_an_error_raised_by_a_spec_survives_a_pickle() -> None:
    with pytest.raises(errors.SpecError) as caught:
        LayerSpec(num_heads=0, num_kv_heads=1, head_size=64)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_error_about_no_backend_carries_the_decision() -> None:
    error = errors.NoBackendError("no backend serves layer 0", {"chosen": None})
    read = pickle.loads(pickle.dumps(error))
    assert (str(read), read.decision) == ("no backend serves layer 0", {"chosen": None})
    assert errors.NoBackendError("no backend").decision is None


def test_an_error_about_one_backend_carries_its_reasons() -> None:
    reason = Reason("MLA not supported", code="mla")
    error = errors.BackendUnavailableError("TORCH does not serve layer 0", None, [reason])
    read = pickle.loads(pickle.dumps(error))
    assert (str(read), read.reasons, read.reasons[0].code) == (str(error), (reason,), "mla")
    assert errors.BackendUnavailableError("not there").reasons == ()
