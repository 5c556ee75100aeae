/* SPDX-License-Identifier: MIT */
#ifndef SYS_TOPOLOGY_H
#define SYS_TOPOLOGY_H
/* What the machine looks like to this process: usable cores, NUMA nodes. */

/* Cores this process may use now: affinity, further limited by a cgroup's CPU quota. At least 1. */
unsigned int topology_cores(void);

/* How many NUMA nodes have cores. */
unsigned int topology_nodes(void);

/* NUMA node of a PCI device ("0000:17:00.0"), -1 where unknown. */
int topology_pci_node(const char *bus_id);

/* Keep the calling thread on the cores of `node` that it may use. -1: no wish. */
void topology_bind_thread(int node);

#endif
