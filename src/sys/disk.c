/* SPDX-License-Identifier: MIT */
/* Statistics of disks; see disk.h. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/sysmacros.h>
#include "sys/disk.h"
#include "sys/os.h"

#define SECTOR 512u	/* of the statistics, whatever the disk has */

/* Is it hardware? What the kernel makes out of other disks, or of memory, has no such entry. */
static int is_hardware(const char *folder)
{
	char path[PATH_MAX];
	struct stat found;

	return snprintf(path, sizeof(path), "%s/device", folder) < PATH_MAX &&
	       !os_stat(AT_FDCWD, path, &found);
}

void disk_of(const char *root, dev_t number, struct disk *disk)
{
	static const char *const places[] = { "", "/.." };	/* a disk's; its partition's */

	for (int i = 0; i < 2; i++) {
		snprintf(disk->folder, sizeof(disk->folder), "%s/sys/dev/block/%u:%u%s", root,
			 major(number), minor(number), places[i]);
		disk->all = 0;
		if (is_hardware(disk->folder))
			return;
	}
	snprintf(disk->folder, sizeof(disk->folder), "%s/sys/block", root);
	disk->all = 1;
}

/* Fields 1, 3, 5, 7, 9, 12 and 16 of Documentation/block/stat.rst; the last two are new. */
static int add(const char *folder, struct disk_counts *counts)
{
	unsigned long long reads, read, writes, written, flying, discards = 0, flushes = 0;
	char path[PATH_MAX], text[512];

	if (snprintf(path, sizeof(path), "%s/stat", folder) >= PATH_MAX ||
	    os_read_text(path, text, sizeof(text)) ||
	    sscanf(text, "%llu %*u %llu %*u %llu %*u %llu %*u %llu %*u %*u %llu %*u %*u %*u %llu",
		   &reads, &read, &writes, &written, &flying, &discards, &flushes) < 5)
		return -ENOENT;
	counts->requests += reads + writes + discards + flushes;
	counts->bytes += (read + written) * SECTOR;
	counts->in_flight += flying;
	return 0;
}

struct sum {
	const char *folder;
	struct disk_counts *counts;
	int found;
};

static int add_hardware(const char *name, void *context)
{
	struct sum *sum = context;
	char folder[PATH_MAX];

	if (snprintf(folder, sizeof(folder), "%s/%s", sum->folder, name) < PATH_MAX &&
	    is_hardware(folder))
		sum->found |= !add(folder, sum->counts);
	return 0;
}

int disk_look(const struct disk *disk, struct disk_counts *counts)
{
	struct sum sum = { disk->folder, counts, 0 };

	memset(counts, 0, sizeof(*counts));
	if (!disk->all)
		return add(disk->folder, counts);
	os_list(AT_FDCWD, disk->folder, add_hardware, &sum);
	return sum.found ? 0 : -ENOENT;
}

uint64_t disk_others(const struct disk_counts *before, const struct disk_counts *after,
		     uint64_t own)
{
	uint64_t all = after->bytes - before->bytes;

	return all > own ? all - own : 0;
}
