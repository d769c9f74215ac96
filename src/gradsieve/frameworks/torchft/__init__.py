"""gradsieve inside torchft 0.2: a lost replica costs an exchange, not the training.

    rendezvous = Rendezvous()
    manager = torchft.Manager(pg=rendezvous, use_async_quorum=False, min_replica_size=2, ...)
    sync = ElasticSync(manager, rendezvous, model.named_parameters(), optimizer, density=0.01)
    if (folder / "manifest.json").exists():
        sync.load(folder)                  # all started again: from there. One that rejoins: from its peers
    while manager.current_step() < steps:
        loss.backward()
        if sync.reduce():
            optimizer.step()
        if manager.current_step() % 100 == 0:
            sync.save(folder)
    sync.flush()

torchft decides who is there (quorum) and whether an exchange counts (`should_commit`), and brings replicas up
from a peer's state. gradsieve exchanges, in a gloo group of every quorum's members that fails, with a name,
soon after one of them dies: torchft's own groups are not registered with torch.distributed, which messages
from rank to rank need here. What becomes of the residuals: `member.py`.

If a lighthouse is gone for a while, torchft's Manager asks again `quorum_retries` times within
`quorum_timeout`. By default it does not, and all replicas end. A restarted lighthouse counts its quorums from
1, so a group's rendezvous is named by that number and the exchange.

A replica is one process, and torch.distributed's default group belongs to the sync.
"""

from gradsieve.frameworks.torchft.adapter import ElasticSync, Rendezvous

__all__ = ["ElasticSync", "Rendezvous"]
