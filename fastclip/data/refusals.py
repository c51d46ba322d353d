"""What is said of a backward pass that may not train on the batch in hand."""

from __future__ import annotations

ANOTHER = (
    "sums of an unfinished logical batch are held (its loop was left, or one of its physical batches "
    "was skipped), and this batch is another draw of the data loader: a sample of both would contribute "
    "twice to one release. Call optimizer.discard_logical_batch() where a loop is left or a batch "
    "skipped, and let every draw be a step of its own (BatchMemoryManager splits large ones)"
)
BORDER = (
    "batches of two passes over the data loader are accumulated for one step: a sample of both would "
    "contribute twice to one release. Call optimizer.step() at the end of each pass, or leave the last "
    "batches out with optimizer.discard_logical_batch()"
)
AHEAD = (
    "a physical batch was drawn before the one before it was stepped, so it is not known which of them "
    "ends the logical batch: leave the loop. Where a batch is skipped, call "
    "optimizer.discard_logical_batch() before the next one is drawn; where another library draws ahead, "
    "prepare the loader with Accelerate before BatchMemoryManager"
)
UNDRAWN = (
    "a backward pass came without a batch of the data loader that make_private returned: its batches "
    "have all been used, or this one comes from another loader, whose draws epsilon does not speak of. "
    "Iterate over the returned loader and use each of its batches once; wrap passes that must not "
    "train in engine.paused()"
)
EMPTY = (
    "a Poisson draw without rows was passed over: it is a step, of noise alone, and a loop that leaves "
    "it out shows when nobody was drawn, so that epsilon would be larger than what is accounted. Train "
    "on the empty batch as on the others; where the model or the loss cannot take 0 rows, pass "
    "rand_on_empty=True to make_private, which makes it a placeholder row that contributes nothing"
)
FORKED = (
    "this batch was drawn before this process was forked, and its parent may train on it, too: two "
    "releases of one draw are not two draws. Call optimizer.discard_logical_batch() and go on with the "
    "next batch, which is drawn here"
)
SHARED = (
    "another model has released this draw of the data loader: two releases of one draw are not two "
    "draws, and epsilon would be larger than what is accounted. Give each model a data loader of its "
    "own (make_private of the original loader returns one), or train both as parts of one module, by "
    "one make_private"
)
REORDERED = (
    "the rows of a draw come through a {name} around the sampler of the data loader that make_private "
    "returned, and a row's place in its draw says whose it is (unit_ids): iterate over that loader "
    "itself (BatchMemoryManager and Accelerate may be around it)"
)
HALVES = (
    "the calls of the model under one loss were given {rows} rows for {drawn} that the data loader "
    "drew, and rows of several calls are credited as the same samples: pass every call the whole batch, "
    "its rows in the same order (BatchMemoryManager splits large batches; leave out rows in the data "
    "set, not in collate_fn)"
)
AT_ONCE = (
    "the sampler drew {drawn} samples by one key, and the model was given {rows}, so several may be "
    "clipped as one. Give the model all samples that the data set returns, along its batch axis, or let "
    "the data set return one sample for each key"
)
TOO_MANY = (
    "expected at most {left} samples in this backward pass, for the data loader drew {drawn} rows "
    "({used} of them have contributed to this step), got {rows}: a row of the data set must stay one "
    "row of the batch, for each is clipped as one. Use each batch once, and let neither the data set "
    "nor collate_fn make several rows of one (views=K of make_private is for K views of each sample); "
    "where tensors of one batch are joined for one call (torch.cat), call the model once for "
    "each, or let its forward join them"
)
ONE_PASS = (
    "a batch of a stream (IterableDataset) serves one backward pass in a step, for it is not known how "
    "many rows the stream gave, so that a second pass may hold the same rows again: pass the whole "
    "batch through the model at once and take a step before it is used again (average the losses of "
    "several views inside the model's row); where the batch is too large, make batch_size smaller and "
    "call optimizer.step() after several batches"
)
UNCLEAR = (
    "several batches have been drawn ahead, one of them is empty (rand_on_empty=True puts a placeholder "
    "row in its place), and it cannot be told whether that row is the one of this backward pass; draw "
    "the next batch after the step, or set rand_on_empty=False"
)
UNCLEAR_UNITS = (
    "several batches have been drawn and not used, and it cannot be told which of them this backward "
    "pass trains on, so neither whose its rows are: use every batch, and draw the next one after the "
    "step (neither prefetch, keep nor skip; iterate over the returned loader itself)"
)
UNKNOWN_CUT = (
    "a sampler around the data loader's has split a draw of units, and it is not known where, so that "
    "rows of one unit may be in two parts: split by Opacus' BatchMemoryManager, "
    "or bound the draw by max_batch_size and max_rows_per_unit"
)
SHARDED = (
    "the data loader that make_private returned draws this rank's share of the rows, and Accelerate's "
    "{name} around its sampler would share it out again, among {ranks} ranks: prepare everything but "
    "the data loader with Accelerate, and iterate over the one that make_private returned (move its "
    "batches with .to(accelerator.device))"
)
