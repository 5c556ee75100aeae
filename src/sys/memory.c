/* SPDX-License-Identifier: MIT */
/* Memory that may still be taken; see memory.h. */
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include "sys/memory.h"
#include "sys/os.h"

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

/* More than any of the files has. */
struct text {
	char bytes[16 << 10], *rest;
};

/* A file's content; none where it cannot be read. */
static void read_under(const char *root, const char *folder, const char *group, const char *name,
		       struct text *text)
{
	char path[PATH_MAX];

	text->bytes[0] = 0;
	text->rest = text->bytes;
	if (snprintf(path, sizeof(path), "%s%s%s/%s", root, folder, group, name) < PATH_MAX &&
	    os_read_text(path, text->bytes, sizeof(text->bytes)))
		text->bytes[0] = 0;
}

static char *next_line(struct text *text)
{
	return strtok_r(NULL, "\n", &text->rest);
}

static uint64_t of_machine(const char *root)
{
	unsigned long long kib = ULLONG_MAX >> 10;
	struct text text;
	char *line;

	read_under(root, "/proc", "", "meminfo", &text);
	while ((line = next_line(&text)))
		if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
			break;
	return kib < ULLONG_MAX >> 10 ? (uint64_t)kib << 10 : UINT64_MAX;
}

/* One number of a group; false where there is none, as where there is no limit ("max"). */
static bool read_number(const char *root, const struct kind *kind, const char *group,
			const char *name, unsigned long long *number)
{
	struct text text;

	read_under(root, kind->mount, group, name, &text);
	return sscanf(text.bytes, "%llu", number) == 1;
}

static uint64_t cached_by(const char *root, const struct kind *kind, const char *group)
{
	unsigned long long number;
	uint64_t cached = 0;
	struct text text;
	char name[64], *line;

	read_under(root, kind->mount, group, "memory.stat", &text);
	while ((line = next_line(&text)))
		if (sscanf(line, "%63s %llu", name, &number) == 2 &&
		    (!strcmp(name, kind->cached[0]) || !strcmp(name, kind->cached[1])))
			cached += number;
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
	char list[128], *line;
	struct text text;
	int group;

	/* "4:memory:/a/b" of the version that has a tree for each thing, "0::/a/b" of the one tree
	 * for all. */
	read_under(root, "/proc", "", "self/cgroup", &text);
	while ((line = next_line(&text))) {
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
	return least;
}
