"""One model over several hosts, for the server: one process decides, one worker per host computes.

The front is the server's process. It has the whole host side of an engine: scheduler, sequences,
recovery, grammars, prefix bookkeeping and every clock. Below `ModelRunner`, its executor
(`remote.RemoteExecutor`) turns calls of programs into entries of a log. Each worker (`worker`)
reads the same entries from a connection of its own and executes them in order on a global mesh of
all hosts' devices, so that all make the same calls, and no worker decides anything.

```
   front                                             every worker (jax.distributed)
 Engine -> ModelRunner -> RemoteExecutor             LocalExecutor on the global mesh
              |  inputs by value, states by handle        ^
              v                                           |
        HostGroup -- Compile, CallProgram, Put, Free ---> log, executed in order
              ^                                           |
              +------- Value: outputs, by worker 0 -------+
```

| file | contents |
| --- | --- |
| `messages.py` | entries of the log, replies of workers, and their encoding; no pickle |
| `channel.py` | frames, the proof of a token, the port to join on, tunnels to JAX's coordinator |
| `worker.py` | the worker's process |
| `group.py` | `HostGroup`: starts, connects, watches and kills workers |
| `remote.py` | the executor of the front and its handles; loads an engine over a new group |
| `launch.py` | workers as child processes; `dflash_jax.ray.hosts` starts them on a cluster |

A worker that dies, raises or stops answering loses the state of all, so the group fails as a
whole: every wait ends with `HostError`, all workers are killed, and the server starts a new group.
A worker ends by itself when its connection to the front closes.
"""
