/* SPDX-License-Identifier: MIT */
/* What the machine looks like to this process; see topology.h. */
#include <ctype.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "sys/topology.h"

/* The first line of a small file of /sys or /proc; false where there is none. */
static int first_line(const char *path, char *line, int size)
{
	FILE *file = fopen(path, "re");
	int ok = file && fgets(line, size, file);

	if (file)
		fclose(file);
	return ok;
}

/* Cores by a cgroup's quota ("max 100000" or "200000 100000"), or 0 where there is no limit. */
static unsigned int quota_cores(void)
{
	char line[64];
	long quota, period;

	if (first_line("/sys/fs/cgroup/cpu.max", line, sizeof(line))) {
		if (sscanf(line, "%ld %ld", &quota, &period) != 2)
			return 0;
	} else {
		if (!first_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", line, sizeof(line)))
			return 0;
		quota = atol(line);
		if (!first_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us", line, sizeof(line)))
			return 0;
		period = atol(line);
	}
	return quota > 0 && period > 0 ? (unsigned int)((quota + period - 1) / period) : 0;
}

unsigned int topology_cores(void)
{
	cpu_set_t set;
	unsigned int cores = 1, quota = quota_cores();

	if (!sched_getaffinity(0, sizeof(set), &set) && CPU_COUNT(&set) > 0)
		cores = (unsigned int)CPU_COUNT(&set);
	return quota && quota < cores ? quota : cores;
}

unsigned int topology_nodes(void)
{
	char path[96], list[1024];
	unsigned int nodes = 0;

	for (int node = 0; node < 64; node++) {
		snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpulist", node);
		/* A node of memory alone has an empty list. */
		nodes += first_line(path, list, sizeof(list)) && isdigit((unsigned char)list[0]);
	}
	return nodes ? nodes : 1;
}

int topology_pci_node(const char *bus_id)
{
	char path[128], line[32], lower[32];
	size_t i;

	for (i = 0; bus_id[i] && i + 1 < sizeof(lower); i++)
		lower[i] = (char)tolower((unsigned char)bus_id[i]);
	lower[i] = 0;
	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/numa_node", lower);
	return first_line(path, line, sizeof(line)) ? atoi(line) : -1;
}

/* Add "0-3,8,10-11" to the set. */
static void parse_cpus(const char *list, cpu_set_t *set)
{
	while (*list && isdigit((unsigned char)*list)) {
		char *end;
		long from = strtol(list, &end, 10), to = from;

		if (*end == '-')
			to = strtol(end + 1, &end, 10);
		for (long cpu = from; cpu <= to && cpu < CPU_SETSIZE; cpu++)
			CPU_SET((size_t)cpu, set);
		list = *end == ',' ? end + 1 : end;
	}
}

void topology_bind_thread(int node)
{
	char path[96], list[1024];
	cpu_set_t wanted, allowed;

	if (node < 0)
		return;
	snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpulist", node);
	if (!first_line(path, list, sizeof(list)))
		return;
	CPU_ZERO(&wanted);
	parse_cpus(list, &wanted);
	if (sched_getaffinity(0, sizeof(allowed), &allowed))
		return;
	CPU_AND(&wanted, &wanted, &allowed);
	if (CPU_COUNT(&wanted))
		sched_setaffinity(0, sizeof(wanted), &wanted);
}
