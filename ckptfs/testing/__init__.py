"""Tools for the tests of users of ckptfs. They are shipped, but ckptfs itself never imports them.

conformance  tests of what every backend must do (subclass ``StorageConformance``)
faults       a storage that fails, loses answers or kills the process at a chosen operation
memory_object_store  an object store in memory, with planned faults, with the interface of the clients
nodes        node-local disks as directories of one machine
disk         a disk that forgets what was not synced
readonly     a storage that refuses to write
world        ranks as threads, on nodes of your choice
"""
