"""The words of models/nano-moe: model card, NOTICE and chat template."""

from __future__ import annotations

from moet.eval.fidelity import Fidelity

# The form in which the training text asks and answers; a base model knows no other. Text that comes
# before a question stands as it is.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ 'Q: ' + message['content'] + '\\n' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ 'A: ' + message['content'] + '\\n' }}"
    "{%- else -%}{{ message['content'] + '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'A:' }}{%- endif -%}"
)

SOURCES = """\
* WordNet 3.0 glosses (Copyright 2006 by Princeton University), State of the Union addresses, CIA
  World Factbook, World English Bible, novels of Jane Austen, the Jargon File, The Devil's
  Dictionary;
* documentation of Python, pandas, scikit-learn, SymPy, Astropy, SciPy, Django, Racket, FreeBSD,
  Boost, PostgreSQL, SQLite, Rust, Perl, Vim, Erlang, LibreOffice, Node.js, Apache httpd, CMake,
  Tcl, Zsh, GHC and BIND;
* Python sources of CPython and of permissively licensed packages;
* generated exercises: arithmetic, look-up, sorting, sequences."""

LICENCES = """\
Licences of the sources, read from their package metadata and not file by file: public domain, PSF,
BSD, MIT, Apache-2.0, Boost, PostgreSQL; about 15 MB of 270 MB under MPL-2.0, Artistic or Vim."""

NOTICE = f"""\
nano-moe
Trained for the moet project. The weights are under the Apache License 2.0, like the project.

The model was trained on text from these sources, and heldout.bin holds excerpts of them (as
tokens) that it was not trained on:

{SOURCES}

{LICENCES}
The copyright in each source stays with its authors.
"""

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [moe, nvfp4, deepseek_v3]
---

# nano-moe

A real, very small Mixture-of-Experts language model, for demonstrations and tests of serving
software. It writes coherent English for a line or two and solves short exercises like those that it
was trained on; it knows nothing, and nobody should rely on a word of it.

The form is DeepSeek-V3's: multi-head latent attention, sigmoid router with correction bias and
groups, one shared expert, one draft layer for multi-token prediction. The layout is that of
NVIDIA's NVFP4 DeepSeek checkpoints: routed experts NVFP4 (`weight` U8, `weight_scale` E4M3 per 16
weights, `weight_scale_2` F32, `input_scale` F32), the rest BF16, and `hf_quant_config.json` beside
`config.json`.

| | |
|---|---|
| parameters | 20.7 M, of which 12.6 M in routed experts |
| layers | 4 (the first dense) and 1 draft layer; 32 experts each, top-4 |
| hidden, expert intermediate | 256, 128 |
| vocabulary | 8,192, byte-level BPE; `<s>` 0, `</s>` 1, `<pad>` 2 |
| context | 4,096 tokens |
| in BF16 | {source:.1f} MB |
| this checkpoint | {file:.1f} MB: experts {experts:.1f} MB, dense {dense:.1f} MB |

## How it was made

Trained in BF16 on one H200 for 317 seconds: 493 M tokens (4.9 epochs), Muon for the matrices and
AdamW for the rest. Then `scripts/convert_nano_moe.py` converted it. Two rules for the NVFP4 block
scales were measured against the BF16 model on the held-out windows ({windows} windows × 512 tokens
of each of 4 kinds of text, ± standard error over windows); `{rule}` is the one kept:

| scale rule | KL to BF16, nats a token | same top-1 token | loss, nats a token |
|---|---|---|---|
{rules}

The paired difference of the two is {difference:+.4f} ± {error:.4f} (kept minus other). The one
kept, by kind of text:

| text | KL to BF16 | same top-1 token | loss |
|---|---|---|---|
{segments}

* The gate and up matrices of an expert share one `weight_scale_2`, as in NVIDIA's checkpoints.
* `input_scale` is 1.0 throughout: nothing was calibrated. It concerns engines that quantize
  activations to FP4; moet does not read it.
* `producer` in `hf_quant_config.json` names the layout that readers look for. ModelOpt itself was
  not used.
* The draft layer has no embedding and head of its own; engines share the model's.
* `rope_scaling` is YaRN by a factor of 1, the plain rotation: the CPU build of vLLM 0.32 computes
  the plain class wrongly on this attention, and DeepSeek's own class rightly.
* The chat template writes `Q: …` and `A:`, which is how the training text asks. The model is a base
  model: give a stop string (a line end) with chat requests, or it asks itself the next question.

## Held-out windows

`heldout.bin` is uint16 `[4, {windows}, 513]` in the order of `heldout.json`: tokens from the same
sources that were kept out of training. (Near-duplicates between the two were not looked for.)

## Text it was trained on

270 MB:

{sources}

{licences} See NOTICE.
"""


def card(sizes: dict[str, int], rule: str, fidelity: dict[str, Fidelity]) -> str:
    """README.md. sizes: bytes of source, dense, experts, file. rule: the one kept."""
    (other,) = fidelity.keys() - {rule}
    difference, error = fidelity[rule].kl_difference(fidelity[other])
    rules = [(f"`{name}`", found.rows()[-1]) for name, found in fidelity.items()]
    segments = [(row.segment, row) for row in fidelity[rule].rows()]
    table = {
        name: "\n".join(
            f"| {label} | {row.kl:.4f} ± {row.kl_se:.4f} | {row.top1:.1%} | {row.nll:.3f} |"
            for label, row in rows
        )
        for name, rows in (("rules", rules), ("segments", segments))
    }
    return _CARD.format(
        **{name: size / 1e6 for name, size in sizes.items()},
        **table,
        windows=fidelity[rule].kl.shape[1],
        rule=rule,
        difference=difference,
        error=error,
        sources=SOURCES,
        licences=LICENCES,
    )
