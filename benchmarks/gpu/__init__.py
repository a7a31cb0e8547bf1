"""The GPU gate: correctness first, then figures, in shards of at most eight and a half minutes.

    make gpu-gate              all shards, what has been done already is kept
    make gpu-gate SHARD=1      one of them

On a machine that is lent for a quarter of an hour the first two shards are what there is time for: what the machine
has (`ooc doctor`), the tests, `ooc demo`, bits of many models and programs side by side; bits and peak of two models.
Then come ResNet-50 at 16 GiB, its larger batches, and the language model of 1.3 G parameters. Each item is on disk
when it ends, under bench-out/gpu-gate, and is not run again (`--retry`: what was wrong or overran is); `OOC_COMMIT`
names the commit where there is no git, else a hash of the files does. Where only one folder of the machine comes back,
name it: `make gpu-gate SHARD=1 ARGS="--out FOLDER"`. An item whose time is up is *overran*, neither right nor wrong,
and costs no other. What a process that failed has told is in the log beside the results, and its end on the terminal,
last of all: the machine may be gone when somebody reads it.

What the figures mean:

- "samples": the last three of ten steps, after planning; float32 without TF32, batches made beforehand.
- "aliased": computation alone, all tensors in the same 16 GiB (`aliased.py`), at any batch size.
- "fraction of the limit": max(computation alone, least time of the step's bytes on both links) / step; the links'
  rates are measured when the session opens, each way alone and both at once.
- "remapped", "best_fit": the same policies without standing aliases, and without virtual addressing (`ablations.py`).
- "internal fragmentation": of the chunks that the plan holds at its fullest moment, the part that holds no byte.

`items.py` says what is measured, `child.py` trains in a process of its own, `gate.py` runs, resumes and
prints. `--fake` runs the same over the fake driver, small, to try the gate itself; its figures mean nothing.
"""
