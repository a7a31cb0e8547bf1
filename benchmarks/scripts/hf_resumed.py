"""A Trainer that resumes from its own checkpoint, in the process that wrote it: two thirds, and then the rest."""

import tempfile

import hf_common
from common import LENGTH, time_optimizer_steps

time_optimizer_steps()
with tempfile.TemporaryDirectory() as folder:
    hf_common.make_trainer(hf_common.make_model(), folder, max_steps=16 * LENGTH, save_steps=16 * LENGTH).train()
    trainer = hf_common.make_trainer(hf_common.make_model(), folder)
    trainer.train(resume_from_checkpoint=True)
    hf_common.tell_history(trainer)
