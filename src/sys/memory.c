/* SPDX-License-Identifier: MIT */
/* Memory that may still be taken; see memory.h. */
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "sys/fault.h"
#include "sys/memory.h"

/* What the two versions of control groups call the same things. */
struct kind {
	const char *mount;	/* where the groups are */
	const char *limits[2];	/* what kills, and what slows down; NULL: there is none */
	const char *used;
	const char *cached[2];	/* in memory.stat: what of it are pages of files */
};

static const struct kind unified = {
	"/sys/fs/cgroup", { "memory.max", "memory.high" }, "memory.current",
	{ "active_file", "inactive_file" },
};
static const struct kind separate = {
	"/sys/fs/cgroup/memory", { "memory.limit_in_bytes", NULL }, "memory.usage_in_bytes",
	{ "total_active_file", "total_inactive_file" },
};

static FILE *open_under(const char *root, const char *path)
{
	char full[PATH_MAX];

	if (sys_fault("fopen") || snprintf(full, sizeof(full), "%s%s", root, path) >= PATH_MAX)
		return NULL;
	return fopen(full, "re");
}

static uint64_t of_machine(const char *root)
{
	unsigned long long kib = ULLONG_MAX >> 10;
	FILE *file = open_under(root, "/proc/meminfo");
	char line[128];

	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
			break;
	if (file)
		fclose(file);
	return kib < ULLONG_MAX >> 10 ? (uint64_t)kib << 10 : UINT64_MAX;
}

/* One number of a group; false where there is none, as where there is no limit ("max"). */
static bool read_number(const char *root, const struct kind *kind, const char *group,
			const char *name, unsigned long long *number)
{
	char path[PATH_MAX];
	FILE *file = NULL;
	bool found;

	if (snprintf(path, sizeof(path), "%s%s/%s", kind->mount, group, name) < PATH_MAX)
		file = open_under(root, path);
	found = file && fscanf(file, "%llu", number) == 1;
	if (file)
		fclose(file);
	return found;
}

static uint64_t cached_by(const char *root, const struct kind *kind, const char *group)
{
	char path[PATH_MAX], line[128], name[64];
	unsigned long long number;
	uint64_t cached = 0;
	FILE *file = NULL;

	if (snprintf(path, sizeof(path), "%s%s/memory.stat", kind->mount, group) < PATH_MAX)
		file = open_under(root, path);
	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "%63s %llu", name, &number) == 2 &&
		    (!strcmp(name, kind->cached[0]) || !strcmp(name, kind->cached[1])))
			cached += number;
	if (file)
		fclose(file);
	return cached;
}

/* What one group leaves. One that is not to be seen from here, as in a container that knows its
 * name outside, has no say. */
static uint64_t of_group(const char *root, const struct kind *kind, const char *group)
{
	unsigned long long limit = ULLONG_MAX, found, used;
	uint64_t cached;

	for (int i = 0; i < 2; i++)
		if (kind->limits[i] && read_number(root, kind, group, kind->limits[i], &found) &&
		    found < limit)
			limit = found;
	if (limit == ULLONG_MAX || !read_number(root, kind, group, kind->used, &used))
		return UINT64_MAX;
	cached = cached_by(root, kind, group);
	used = used > cached ? used - cached : 0;
	return limit > used ? limit - used : 0;
}

/* A group and all above it; `group` is cut short on the way. */
static uint64_t of_groups(const char *root, const struct kind *kind, char *group)
{
	uint64_t least = UINT64_MAX;

	for (;;) {
		char *slash = strrchr(group, '/');
		uint64_t left;

		/* The root is written "/", and "" below. */
		if (slash && !slash[1])
			*slash = 0;
		left = of_group(root, kind, group);
		if (left < least)
			least = left;
		slash = strrchr(group, '/');
		if (!slash)
			return least;
		*slash = 0;
	}
}

uint64_t memory_available(const char *root)
{
	uint64_t least = of_machine(root), left = UINT64_MAX;
	FILE *file = open_under(root, "/proc/self/cgroup");
	char line[PATH_MAX], list[128];
	int group;

	/* "4:memory:/a/b" of the version that has a tree for each thing, "0::/a/b" of the one tree
	 * for all. */
	while (file && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		list[0] = 0;
		group = 0;
		if (sscanf(line, "%*u::%n", &group) == 0 && group)
			left = of_groups(root, &unified, line + group);
		else if (sscanf(line, "%*u:%127[^:]:%n", list, &group) == 1 && group &&
			 !strcmp(list, "memory"))
			left = of_groups(root, &separate, line + group);
		if (left < least)
			least = left;
	}
	if (file)
		fclose(file);
	return least;
}
