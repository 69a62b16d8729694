"""vLLM as the engine: inside this process or behind HTTP servers, with versioned weights and routes that fit.

`engine.VllmEngine` is what episodes are played with; it spreads calls over a `replica_set`. A replica is one vLLM,
reached by `inprocess_replica.InProcessReplica` (an engine that this process starts) or `http_replica.HttpReplica` (a
server that `server` starts). `worker` runs inside vLLM. Only `inprocess_replica` and `worker` import vllm.
"""
