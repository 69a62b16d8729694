"""vLLM as the engine: inside this process or behind HTTP servers, with versioned weights and recorded routes.

`engine.VllmEngine` is what episodes are played with. It spreads calls over a `replica_set.ReplicaSet`; a replica is one
vLLM, in this process (`inprocess_replica.InProcessReplica`) or a server (`http_replica.HttpReplica`), and a
`replica_state.ReplicaState` keeps track of its weights and calls. `server` and `server_group` start servers, `worker`
runs inside vLLM. Only `inprocess_replica` and `worker` import vllm at their top.
"""
