"""The trainer: rollouts in, better weights out.

trainer            the loop over iterations
actor_critic       the live models of this rank, with optimizers, anchor and reference
rollout_sources/   where an iteration's rollouts come from
records            what a scored batch holds
forward            passes over trajectories: plan, micro-batches, readings on every rank
score              values, log-probs of anchor and reference, advantages and returns of a batch
epochs             the optimizer steps of an iteration, in order
update             one optimizer step of the actor or the critic
first_step_check   whether the trainer recognises what the engine sampled
weights            published versions, their canary, HF exports
checkpoint         directories that a run continues from, complete or not there
partial_iteration  what a checkpoint keeps of an iteration stopped between two steps
checkpoint_source  checkpoints of a run as HF weights, without building the model
stopping           a request to stop, on which all ranks agree
throughput         tokens per second and model FLOPs utilisation
warm_start         supervised training on demonstrations, before a run
offline_scoring    scores of recorded rollouts, without training
"""
