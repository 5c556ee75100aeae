/* SPDX-License-Identifier: MIT */
#ifndef SYS_DISK_H
#define SYS_DISK_H
/*
 * What the disk under a file does for everybody, by its statistics. So one who reads in the
 * background can tell whether others want the disk: under the scheduler "none", which fast disks
 * have, the kernel's classes of I/O do nothing.
 *
 * A file on a partition or a whole disk is known to be there. Any other (a logical volume, an
 * overlay, btrfs) may be on any disk: then all of the machine's are watched.
 */
#include <stdint.h>
#include <sys/types.h>

struct disk {
	char folder[160];	/* with its file "stat"; of all of them the folder of links */
	int all;		/* it is a folder of links to disks */
};

/* Since the machine was started. */
struct disk_counts {
	uint64_t requests;	/* that have come to their end, of any kind */
	uint64_t bytes;		/* read and written */
	uint64_t in_flight;	/* requests now */
};

/* The disk that files of this device number are on. `root` is what /sys is found under: "", or the
 * folder of a test. */
void disk_of(const char *root, dev_t number, struct disk *disk);

/* -ENOENT where there are no statistics. */
int disk_look(const struct disk *disk, struct disk_counts *counts);

/* Bytes that others moved between two looks, by one who knows what it moved itself. */
uint64_t disk_others(const struct disk_counts *before, const struct disk_counts *after,
		     uint64_t own);

#endif
