"""The mathematics of training, as pure functions of tensors and scalars.

Everything here works on the decision timeline: flat tensors `[D]` cut by `offsets` int64 `[B+1]` into sequences (or by
`turn_offsets` `[K+1]` into turns). A decision is a token sampled from the policy. Functions never see a configuration,
a process group, a model or a recorded rollout: what needs sums over ranks takes a `segment_sum` callable or global
counts and moments as arguments.

Axis letters: B sequences, D decisions, K turns, T raw tokens, V vocabulary. Log-probs are in nats.
"""
