"""After accelerate's examples: a loop of one's own with `accumulate`, clipping, a schedule, evaluations."""

import torch
from accelerate import Accelerator
from common import LENGTH, tell, tell_bits, time_optimizer_steps
from hf_common import collate, make_model, make_texts
from torch.utils.data import DataLoader

time_optimizer_steps()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=24)
texts = DataLoader(make_texts(48, seed=1), batch_size=4, shuffle=True, collate_fn=collate)
others = DataLoader(make_texts(12, seed=2), batch_size=4, collate_fn=collate)
model, optimizer, schedule, texts, others = accelerator.prepare(model, optimizer, schedule, texts, others)
for epoch in range(4 * LENGTH):
    model.train()
    for index, batch in enumerate(texts):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        tell(index, loss)
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**batch).loss) for batch in others]
    tell(epoch, torch.stack(losses).mean())
tell_bits(accelerator.unwrap_model(model))
