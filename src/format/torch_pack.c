/* SPDX-License-Identifier: MIT */
/*
 * What lies where in a file of several objects. The file is walked through once to learn the
 * places, which fix the sizes of all gaps, and once more to fill these in.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/digest.h"
#include "base/error.h"
#include "format/torch_pack.h"
#include "sys/os.h"

#define PAGE 4096u
#define SMALL_ALIGN 64u
#define SMALL 3u			/* data.pkl, byteorder, version */
#define ARCHIVE "archive/"
#define NAME_ROOM 40u			/* of "archive/data/NUMBER" and its NUL */
#define TABLE_NAME ARCHIVE TORCH_TABLE
#define FILL_MOST (64u << 10)		/* gaps up to this are written twice, not stepped over */

struct small {
	const char *name;
	const void *bytes;
	size_t length;
};

static uint64_t align(uint64_t at, uint64_t to)
{
	return (at + to - 1) / to * to;
}

static int refuse(const char *path, const char *what, const char *hint, struct pen_error *err)
{
	error_set(err, -EINVAL, "save", path, -1, "%s", what);
	error_hint(err, "%s", hint);
	return -EINVAL;
}

static void get_small(const struct pen_torch_item *item, struct small small[SMALL])
{
	small[0] = (struct small){ ARCHIVE "data.pkl", item->bytes, item->length };
	small[1] = (struct small){ ARCHIVE "byteorder", "little", 6 };
	small[2] = (struct small){ ARCHIVE "version", "3\n", 2 };
}

static int check_items(const char *path, const struct pen_torch_item *items, size_t count,
		       struct pen_error *err)
{
	if (!count)
		return refuse(path, "there are no items to write", "Give at least one", err);
	for (size_t i = 0; i < count; i++) {
		const struct pen_torch_item *item = &items[i];
		bool raw = item->flags & PEN_TORCH_RAW;

		if ((!item->bytes && item->length) || (!raw && !item->length))
			return refuse(path, "an item has no bytes",
				      "torch.load needs the pickle of each", err);
		if (item->flags & ~PEN_TORCH_RAW || item->reserved[0] || item->reserved[1] ||
		    (raw && item->storage_count))
			return refuse(path, "an item has flags or reserved fields that mean "
				      "nothing, or is raw and has storages",
				      "Set the others to zero", err);
		for (size_t k = 0; k < item->storage_count; k++)
			if (item->storages[k].key ||
			    (!item->storages[k].memory && item->storages[k].bytes))
				return refuse(path, "a storage has a key, or no memory",
					      "In an item storages are named by their index", err);
	}
	return 0;
}

/* ----------------------------------------------------------------------------------- places -- */

/* A walk through the file; what it finds goes where there is room for it. */
struct walk {
	struct torch_pack *pack;
	uint64_t chunk, at;
	size_t storage;		/* that comes next */
	bool fits;
};

static void place(struct walk *walk, struct zip_entry *entry, uint64_t bytes, uint64_t alignment)
{
	entry->header = walk->at;
	entry->offset = align(walk->at + ZIP_PUT_LOCAL(entry->name_length), alignment);
	entry->bytes = entry->unpacked = bytes;
	walk->fits = walk->fits && !__builtin_add_overflow(entry->offset, bytes, &walk->at) &&
		     walk->at < INT64_MAX / 2;
}

/* Before a storage that has bytes the gap ends, and the next begins on the page after it. */
static void place_storage(struct walk *walk, struct zip_entry *entry,
			  const struct pen_torch_storage *from)
{
	struct torch_gap *gap = &walk->pack->gaps[walk->storage];

	place(walk, entry, from->bytes, from->bytes ? PAGE : SMALL_ALIGN);
	if (!from->bytes || !walk->fits)
		return;
	gap->length = entry->offset - gap->offset;
	walk->at = align(walk->at, PAGE);
	gap[1].offset = walk->at;
	walk->pack->storages[walk->storage++] = (struct torch_packed){ from, entry };
}

static uint64_t entry_size(const struct zip_entry *entry, uint64_t zip)
{
	unsigned char bytes[ZIP_PUT_ENTRY(NAME_ROOM)];
	struct zip_entry own = *entry;

	own.header -= zip;
	return zip_put_entry(bytes, &own);
}

static void set_name(struct zip_entry *entry, const char *name)
{
	entry->name = name;
	entry->name_length = strlen(name);
}

static void place_zip(struct walk *walk, struct torch_pack_zip *zip,
		      const struct pen_torch_item *item)
{
	struct zip_entry *entry = zip->entries;
	struct small small[SMALL];

	get_small(item, small);
	zip->offset = walk->at;
	zip->first_storage = SMALL;
	zip->storage_count = item->storage_count;
	zip->table.chunk = walk->chunk;
	for (size_t i = 0; i < SMALL; i++, entry++) {
		set_name(entry, small[i].name);
		place(walk, entry, small[i].length, SMALL_ALIGN);
	}
	for (size_t i = 0; i < item->storage_count; i++, entry++) {
		set_name(entry, walk->pack->names + i * NAME_ROOM);
		place_storage(walk, entry, &item->storages[i]);
		zip->table.places = torch_places(zip->table.places, entry->offset, entry->bytes);
		zip->table.count += torch_chunks(walk->chunk, entry->offset, entry->bytes);
	}
	set_name(entry, TABLE_NAME);
	place(walk, entry, TORCH_TABLE_HEAD + 8 * zip->table.count, SMALL_ALIGN);
	for (struct zip_entry *each = zip->entries; each <= entry; each++)
		walk->at += entry_size(each, zip->offset);
	walk->at += ZIP_PUT_END;
	zip->length = walk->at - zip->offset;
}

static int lay_out(struct torch_pack *pack, const char *path, struct pen_torch_item *items,
		   size_t count, uint64_t chunk, struct pen_error *err)
{
	struct walk walk = { .pack = pack, .chunk = chunk, .fits = true };
	struct zip_entry *entries = pack->entries;
	struct torch_gap *last;

	for (size_t i = 0; walk.fits && i < count; i++) {
		struct torch_pack_zip *zip = &pack->zips[pack->zip_count];

		items[i].offset = walk.at = align(walk.at, SMALL_ALIGN);
		if (items[i].flags & PEN_TORCH_RAW) {
			walk.fits = !__builtin_add_overflow(walk.at, items[i].length, &walk.at) &&
				    walk.at < INT64_MAX / 2;
			items[i].size = items[i].length;
			continue;
		}
		zip->entries = entries;
		entries += SMALL + items[i].storage_count + 1;
		place_zip(&walk, zip, &items[i]);
		items[i].size = zip->length;
		pack->zip_count++;
	}
	last = &pack->gaps[pack->storage_count];
	last->length = walk.at - last->offset;
	pack->size = walk.at;
	return walk.fits ? 0 : error_sys(err, -EFBIG, "save", path, -1);
}

/* ------------------------------------------------------------------------------------ bytes -- */

/* Where a byte of the file is in memory: in the gap that holds it, `gap` or a later one. */
static unsigned char *find(const struct torch_pack *pack, size_t *gap, uint64_t at)
{
	while (*gap < pack->storage_count &&
	       at >= pack->gaps[*gap].offset + pack->gaps[*gap].length)
		++*gap;
	return pack->gaps[*gap].bytes + (at - pack->gaps[*gap].offset);
}

static void fill_in_zip(struct torch_pack *pack, struct torch_pack_zip *zip,
			const struct pen_torch_item *item, size_t *gap)
{
	struct zip_entry *table = &zip->entries[SMALL + zip->storage_count];
	struct small small[SMALL];

	get_small(item, small);
	for (size_t i = 0; i < SMALL; i++) {
		struct zip_entry *entry = &zip->entries[i];

		entry->crc32 = (uint32_t)digest_kind(PEN_DIGEST_CRC32)->of(small[i].bytes,
									   small[i].length);
		zip_put_local(find(pack, gap, entry->header), entry);
		memcpy(find(pack, gap, entry->offset), small[i].bytes, small[i].length);
	}
	zip->table_bytes = find(pack, gap, table->offset);
	zip->directory = zip->table_bytes + table->bytes;
	torch_table_put(zip->table_bytes, &zip->table);
}

static int fill_in(struct torch_pack *pack, const char *path, const struct pen_torch_item *items,
		   size_t count, struct pen_error *err)
{
	struct torch_pack_zip *zip = pack->zips;
	size_t room = 0, gap = 0;

	for (size_t i = 0; i <= pack->storage_count; i++)
		room += (size_t)pack->gaps[i].length;
	pack->bytes = os_calloc(1, room + 1);
	if (!pack->bytes)
		return error_sys(err, -ENOMEM, "save", path, -1);
	room = 0;
	for (size_t i = 0; i <= pack->storage_count; i++) {
		pack->gaps[i].bytes = pack->bytes + room;
		room += (size_t)pack->gaps[i].length;
	}
	for (size_t i = 0; i < count; i++) {
		if (!(items[i].flags & PEN_TORCH_RAW))
			fill_in_zip(pack, zip++, &items[i], &gap);
		else if (items[i].length)
			memcpy(find(pack, &gap, items[i].offset), items[i].bytes, items[i].length);
	}
	return 0;
}

static bool make_room(struct torch_pack *pack, const struct pen_torch_item *items, size_t count)
{
	size_t entries = 0, zips = 0, most = 0;

	for (size_t i = 0; i < count; i++) {
		if (items[i].flags & PEN_TORCH_RAW)
			continue;
		zips++;
		entries += SMALL + items[i].storage_count + 1;
		most = items[i].storage_count > most ? items[i].storage_count : most;
		for (size_t k = 0; k < items[i].storage_count; k++)
			pack->storage_count += items[i].storages[k].bytes != 0;
	}
	pack->zips = os_calloc(zips + 1, sizeof(pack->zips[0]));
	pack->entries = os_calloc(entries + 1, sizeof(pack->entries[0]));
	pack->gaps = os_calloc(pack->storage_count + 1, sizeof(pack->gaps[0]));
	pack->storages = os_calloc(pack->storage_count + 1, sizeof(pack->storages[0]));
	pack->names = os_calloc(most + 1, NAME_ROOM);
	if (!pack->zips || !pack->entries || !pack->gaps || !pack->storages || !pack->names)
		return false;
	for (size_t i = 0; i < most; i++)
		snprintf(pack->names + i * NAME_ROOM, NAME_ROOM, ARCHIVE TORCH_STORAGE "%zu", i);
	return true;
}

int torch_pack_new(const char *path, struct pen_torch_item *items, size_t count, uint64_t chunk,
		   struct torch_pack **pack, struct pen_error *err)
{
	struct torch_pack *new;
	int rc = check_items(path, items, count, err);

	*pack = NULL;
	if (rc)
		return rc;
	new = os_calloc(1, sizeof(*new));
	if (!new || !make_room(new, items, count))
		rc = error_sys(err, -ENOMEM, "save", path, -1);
	if (!rc)
		rc = lay_out(new, path, items, count, chunk, err);
	if (!rc)
		rc = fill_in(new, path, items, count, err);
	if (rc)
		torch_pack_free(new);
	else
		*pack = new;
	return rc;
}

void torch_pack_free(struct torch_pack *pack)
{
	if (!pack)
		return;
	free(pack->zips);
	free(pack->entries);
	free(pack->gaps);
	free(pack->storages);
	free(pack->names);
	free(pack->bytes);
	free(pack);
}

/* -------------------------------------------------------------------------------- the bytes -- */

size_t torch_pack_extents(const struct torch_pack *pack, struct pen_object *object,
			  struct pen_device *host, bool fill, struct pen_digests *digests,
			  struct pen_extent *extents)
{
	size_t count = 0;

	/* A job without a byte would be none. */
	if (!pack->storage_count)
		extents[count++] = (struct pen_extent){
			.object = object, .memory = pack->gaps[0].bytes, .device = host,
			.length = pack->gaps[0].length,
		};
	for (size_t i = 0; i < pack->storage_count; i++) {
		const struct torch_gap *gap = &pack->gaps[i];
		const struct pen_torch_storage *from = pack->storages[i].from;
		uint64_t offset = pack->storages[i].entry->offset, end = offset + from->bytes;

		if (fill && gap->length <= FILL_MOST)
			extents[count++] = (struct pen_extent){
				.object = object, .offset = gap->offset, .length = gap->length,
				.flags = PEN_FILL, .group = from->group,
			};
		extents[count++] = (struct pen_extent){
			.object = object, .offset = offset, .memory = (void *)from->memory,
			.length = from->bytes, .device = from->device, .group = from->group,
		};
		if (fill && gap[1].offset > end)
			extents[count++] = (struct pen_extent){
				.object = object, .offset = end, .length = gap[1].offset - end,
				.flags = PEN_FILL, .group = from->group,
			};
		torch_digests_cut(digests, gap->offset, gap->length);
		torch_digests_cut(digests, offset, from->bytes);
	}
	torch_digests_cut(digests, pack->gaps[pack->storage_count].offset,
			  pack->gaps[pack->storage_count].length);
	return count;
}

static void seal_zip(struct torch_pack *pack, struct torch_pack_zip *zip, size_t *gap)
{
	size_t count = SMALL + zip->storage_count + 1;
	struct zip_entry *table = &zip->entries[count - 1];
	struct zip_end end = { .directory = table->offset + table->bytes - zip->offset,
			       .count = count };
	unsigned char *at = zip->directory;

	table->crc32 = (uint32_t)digest_kind(PEN_DIGEST_CRC32)->of(zip->table_bytes,
								   (size_t)table->bytes);
	for (size_t i = 0; i < count; i++) {
		struct zip_entry own = zip->entries[i];

		if (i >= SMALL)
			zip_put_local(find(pack, gap, own.header), &own);
		own.header -= zip->offset;
		at += zip_put_entry(at, &own);
	}
	end.length = (uint64_t)(at - zip->directory);
	zip_put_end(at, &end);
}

void torch_pack_seal(struct torch_pack *pack)
{
	size_t gap = 0;

	for (size_t i = 0; i < pack->zip_count; i++)
		seal_zip(pack, &pack->zips[i], &gap);
}
