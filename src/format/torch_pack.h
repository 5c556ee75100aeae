/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_TORCH_PACK_H
#define FORMAT_TORCH_PACK_H
/*
 * Several objects in one file, as torch.distributed.checkpoint has them: each is a zip of torch's
 * with offsets of its own, or bytes as they are. Storages lie at multiples of 4096 of the file;
 * whatever is small - pickles, headers, tables, directories, raw bytes - lies in the gaps before,
 * between and behind them. Pure: torch_save.c moves the bytes.
 *
 * Invariants
 *   1. Gap i is before storage i, the last one behind all; together they are the file, but for the
 *      rest of the page on which a storage ends.
 *   2. All gaps but the first begin with a page, all but the last end with one.
 */
#include "format/torch.h"

struct torch_gap {
	uint64_t offset, length;	/* in the file */
	unsigned char *bytes;
};

/* A storage that has bytes; `entry` says where. */
struct torch_packed {
	const struct pen_torch_storage *from;	/* the caller's; only while the save is started */
	struct zip_entry *entry;
};

struct torch_pack_zip {
	uint64_t offset, length;	/* of the zip, in the file */
	struct zip_entry *entries;	/* three small records, storages, the table; offsets are
					   the file's */
	size_t first_storage, storage_count;	/* among the entries */
	struct torch_table table;
	unsigned char *table_bytes;	/* in a gap, as is the next */
	unsigned char *directory;
};

struct torch_pack {
	struct torch_pack_zip *zips;
	size_t zip_count;
	struct zip_entry *entries;	/* of all zips */
	struct torch_gap *gaps;		/* storage_count + 1 */
	struct torch_packed *storages;
	size_t storage_count;
	char *names;			/* the storages' */
	unsigned char *bytes;		/* of all gaps */
	uint64_t size;			/* of the file */
};

/* Lay items out, and tell each where it is; fills in all that does not depend on storages. */
int torch_pack_new(const char *path, struct pen_torch_item *items, size_t count, uint64_t chunk,
		   struct torch_pack **pack, struct pen_error *err);
void torch_pack_free(struct torch_pack *pack);

/*
 * Extents that write the storages, with fills as far as that makes one run of whole blocks; and
 * where digests are cut. Returns how many: at most 3 for each storage, and 1.
 */
size_t torch_pack_extents(const struct torch_pack *pack, struct pen_object *object,
			  struct pen_device *host, bool fill, struct pen_digests *digests,
			  struct pen_extent *extents);

/* When the CRC32s of the entries and the digests in the tables are there: what names them. */
void torch_pack_seal(struct torch_pack *pack);

#endif
