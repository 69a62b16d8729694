"""vLLM as the engine: inside this process or behind HTTP servers, with versioned weights and routes that fit.

`pool.VllmEngine` is what episodes are played with; it spreads calls over replicas. A replica is one vLLM, reached by
`embedded.EmbeddedReplica` (an engine that this process starts) or `remote.HttpReplica` (a server that `server` starts).
`worker` runs inside vLLM. Modules other than `embedded` and `worker` do not import vllm.
"""
