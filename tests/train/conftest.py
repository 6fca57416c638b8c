import pytest

from tests.train import made


@pytest.fixture(scope="session")
def model():
    return made.target()


@pytest.fixture(scope="session")
def corpus(model, tmp_path_factory):
    return made.corpus(model, tmp_path_factory.mktemp("texts"))
