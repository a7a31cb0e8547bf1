"""After Hugging Face's run_clm: a Trainer with padding, accumulation, clipping, evaluations and checkpoints."""

import hf_common

hf_common.run()
