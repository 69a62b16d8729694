"""The mathematics of training, as pure functions of tensors and scalars.

Everything here works on the decision timeline: flat tensors `[D]` cut by `offsets` int64 `[B+1]` into sequences (or by
`turn_offsets` `[K+1]` into turns). A decision is a token sampled from the policy. Functions never see a configuration,
a process group, a model or a recorded rollout. A function of sequences, turns or groups takes them whole; counts and
moments of the global batch are arguments.

Axis letters: B sequences, D decisions, K turns, T raw tokens, V vocabulary. Log-probs are in nats.
"""
