"""Where an iteration's rollouts come from.

base               the interface, and what every source is made from
factory            which source a configuration asks for
sync               played by the trainer's ranks when they are asked for
streaming          taken from a rollout worker's stream of shards while it plays on
recorded           read from files that another run recorded
trajectory_buffer  which trajectories of a stream wait, and which of them an iteration takes
validation         from files to a batch that every rank has checked
heartbeat_monitor  whether the rollout worker is alive
worker_process     the trainer's own rollout worker: started, restarted, ended
"""
