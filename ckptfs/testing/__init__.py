"""What a user of ckptfs may need in tests of their own; shipped, and never imported by ckptfs.

conformance  what every backend must do (subclass ``StorageConformance``)
faults       a storage that fails, loses answers or kills the process at a chosen operation
memory_object_store  an object store in memory, with planned faults, behind the contract of the clients
nodes        node-local disks as directories of one machine
disk         a disk that forgets what was not synced
readonly     a storage that refuses to write
world        ranks as threads, on nodes of your choice
"""
