/* SPDX-License-Identifier: MIT */
/*
 * Writing a file of torch's. What lies where is settled before the first byte moves, since all
 * sizes are known:
 *
 *   front     data.pkl and the caller's other records, with their headers
 *   packed    small storages behind their headers, as close as torch has them
 *   storages  all others, each at a multiple of 4096, its header alone on the page before it
 *   tail      the table of digests, the directory, the end
 *
 * Front and storages, with fills between them, are one job of whole blocks, and its digests are
 * the storages' CRC32s. These belong into the headers, which are written when they are known. One
 * that has a page to itself is written as that page. Of small storages that would be more pages
 * than bytes: they are read back, many at a time, and written again with their headers. Then comes
 * the tail, and the file is committed.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/digest.h"
#include "base/error.h"
#include "engine/job.h"
#include "engine/schedule.h"
#include "format/torch.h"
#include "format/torch_pack.h"
#include "io/object.h"
#include "sys/os.h"

#define PAGE 4096u
#define SMALL_ALIGN 64u		/* of small records, as torch has it */
#define PACKED_MAX (32u << 10)	/* storages below this are packed */
#define RUN_MAX (16u << 20)	/* packed storages, with headers, that are read back at a time */
#define NAME_MAX_BYTES 1000u	/* of a record with the archive's; a header must fit its page */
#define ARCHIVE_MAX 100u

struct pen_torch_save {
	struct pen_object *object;
	struct pen_device *host;
	struct pen_job *job;
	struct pen_digests digests;
	struct pen_options options;	/* of the jobs after the first */
	uint64_t started;		/* os_now() */
	uint64_t groups, gathered;	/* of the first job: all, and those that are gathered */
	struct zip_entry *entries;	/* parts, storages, the table: by offset */
	size_t *order;			/* which of the caller's storages each is: packed first */
	size_t part_count, packed_count, storage_count;
	uint64_t front_length;		/* of the front, then nothing up to the first storage */
	unsigned char *front, *tail;
	uint64_t tail_start, size;	/* of the file */
	struct torch_table table;
	char *names;
	struct torch_pack *pack;	/* of several objects: what lies where; NULL: of one */
};

/* What a save is made of, while it is laid out. */
struct layout {
	struct pen_torch_save *save;
	const struct pen_torch_content *content;
	const struct pen_torch_part *parts;	/* with those that were added */
	size_t part_count;
	char archive[ARCHIVE_MAX + 1];
	const char *path;
	struct pen_error *err;
};

static int no_memory(const char *path, struct pen_error *err)
{
	return error_sys(err, -ENOMEM, "save", path, -1);
}

/* -------------------------------------------------------------------------- what is asked -- */

static int refuse(const struct layout *layout, const char *what, const char *hint)
{
	error_set(layout->err, -EINVAL, "save", layout->path, -1, "%s", what);
	error_hint(layout->err, "%s", hint);
	return -EINVAL;
}

/* As torch does: the file's name up to its last point. */
static void name_archive(struct layout *layout)
{
	const char *slash = strrchr(layout->path, '/'), *from = slash ? slash + 1 : layout->path;
	const char *point = strrchr(from, '.');
	size_t length = point ? (size_t)(point - from) : strlen(from);
	bool plain = length && length <= ARCHIVE_MAX;

	for (size_t i = 0; i < length; i++)
		plain &= from[i] > ' ' && from[i] < 0x7f;
	snprintf(layout->archive, sizeof(layout->archive), "%.*s", plain ? (int)length : 7,
		 plain ? from : "archive");
}

static const struct pen_torch_part *find_part(const struct layout *layout, const char *name)
{
	for (size_t i = 0; i < layout->content->part_count; i++)
		if (!strcmp(layout->content->parts[i].name, name))
			return &layout->content->parts[i];
	return NULL;
}

static bool reserved_zero(const uint64_t *reserved, size_t count)
{
	while (count--)
		if (reserved[count])
			return false;
	return true;
}

static int check_options(const char *path, const struct pen_options *options,
			 struct pen_error *err)
{
	if (!options->digest_count && !options->allocate)
		return 0;
	error_set(err, -EINVAL, "save", path, -1,
		  "the options ask for digests or for memory to be allocated");
	error_hint(err, "A save makes the digests that it needs; leave both out");
	return -EINVAL;
}

static int check_content(const struct layout *layout, const struct pen_options *options)
{
	const struct pen_torch_content *content = layout->content;

	if (content->size < sizeof(*content))
		return refuse(layout, "the content's size is not set",
			      "Begin with PEN_TORCH_CONTENT_INIT");
	if (content->archive && (!content->archive[0] || strchr(content->archive, '/') ||
				 strlen(content->archive) > ARCHIVE_MAX))
		return refuse(layout, "the archive's name is no name of a folder",
			      "Take up to 100 bytes without a slash, or NULL");
	for (size_t i = 0; i < content->part_count; i++)
		if (!content->parts[i].name || !content->parts[i].name[0] ||
		    (!content->parts[i].bytes && content->parts[i].length) ||
		    !reserved_zero(content->parts[i].reserved, 2))
			return refuse(layout, "a small record has no name or no bytes, or a "
				      "reserved field is not zero", "Set the others to zero");
	for (size_t i = 0; i < content->storage_count; i++)
		if ((!content->storages[i].memory && content->storages[i].bytes) ||
		    !reserved_zero(content->storages[i].reserved, 3))
			return refuse(layout, "a storage has no memory, or a reserved field is not "
				      "zero", "Set the others to zero");
	if (!find_part(layout, "data.pkl"))
		return refuse(layout, "there is no data.pkl among the small records",
			      "torch.load needs one: add it");
	return check_options(layout->path, options, layout->err);
}

static int by_name(const void *left, const void *right)
{
	const struct zip_entry *a = *(struct zip_entry *const *)left;
	const struct zip_entry *b = *(struct zip_entry *const *)right;

	return strcmp(a->name, b->name);
}

static int check_names(const struct layout *layout, size_t count)
{
	const struct zip_entry **sorted = os_calloc(count, sizeof(sorted[0]));
	int rc = 0;

	if (!sorted)
		return no_memory(layout->path, layout->err);
	for (size_t i = 0; i < count; i++)
		sorted[i] = &layout->save->entries[i];
	qsort(sorted, count, sizeof(sorted[0]), by_name);
	for (size_t i = 1; !rc && i < count; i++)
		if (!by_name(&sorted[i - 1], &sorted[i]))
			rc = refuse(layout, "two records have the same name",
				    "Give each part and each storage a name of its own");
	free(sorted);
	return rc;
}

/* ------------------------------------------------------------------------ what lies where -- */

/* Small storages before the others, those and these in the caller's order. cuFile wants none of
 * them packed: it would write a page that two of them share twice at the same time. */
static int order_storages(struct layout *layout, bool cufile)
{
	const struct pen_torch_content *content = layout->content;
	struct pen_torch_save *save = layout->save;
	uint64_t limit = cufile ? 0 : PACKED_MAX;
	size_t count = 0;

	save->order = os_calloc(content->storage_count + 1, sizeof(save->order[0]));
	if (!save->order)
		return no_memory(layout->path, layout->err);
	for (size_t i = 0; i < content->storage_count; i++)
		if (content->storages[i].bytes < limit)
			save->order[count++] = i;
	save->packed_count = count;
	for (size_t i = 0; i < content->storage_count; i++)
		if (content->storages[i].bytes >= limit)
			save->order[count++] = i;
	return 0;
}

static char *put_key(char *at, const struct pen_torch_content *content, size_t storage)
{
	if (content->storages[storage].key)
		return stpcpy(stpcpy(at, TORCH_STORAGE), content->storages[storage].key);
	return at + sprintf(at, TORCH_STORAGE "%zu", storage);
}

/* All names, one after the other: "archive/part", "archive/data/key", the table's. */
static int name_entries(struct layout *layout)
{
	const struct pen_torch_content *content = layout->content;
	struct pen_torch_save *save = layout->save;
	size_t count = save->part_count + save->storage_count + 1;
	size_t room = count * (strlen(layout->archive) + 32);
	char *at;

	for (size_t i = 0; i < layout->part_count; i++)
		room += strlen(layout->parts[i].name);
	for (size_t i = 0; i < content->storage_count; i++)
		room += content->storages[i].key ? strlen(content->storages[i].key) : 0;
	save->names = at = os_calloc(1, room);
	save->entries = os_calloc(count, sizeof(save->entries[0]));
	if (!at || !save->entries)
		return no_memory(layout->path, layout->err);
	for (size_t i = 0; i < count; i++) {
		struct zip_entry *entry = &save->entries[i];

		entry->name = at;
		at += sprintf(at, "%s/", layout->archive);
		if (i < save->part_count)
			at = stpcpy(at, layout->parts[i].name);
		else if (i == count - 1)
			at = stpcpy(at, TORCH_TABLE);
		else
			at = put_key(at, content, save->order[i - save->part_count]);
		entry->name_length = (size_t)(at++ - entry->name);
		if (entry->name_length > NAME_MAX_BYTES)
			return refuse(layout, "a record's name is longer than 1000 bytes",
				      "Take a shorter one");
	}
	return check_names(layout, count);
}

static uint64_t align(uint64_t at, uint64_t to)
{
	return (at + to - 1) / to * to;
}

/* Place a record behind what is there; false where the file would get too large. */
static bool place(struct zip_entry *entry, uint64_t header, uint64_t bytes, uint64_t alignment,
		  uint64_t *end)
{
	entry->header = header;
	entry->offset = align(header + ZIP_PUT_LOCAL(entry->name_length), alignment);
	entry->bytes = entry->unpacked = bytes;
	return !__builtin_add_overflow(entry->offset, bytes, end) && *end < INT64_MAX / 2;
}

/* Does a packed record that ends there belong to the run that begins at `start`? */
static bool is_in_run(const struct zip_entry *entry, uint64_t start)
{
	return entry->offset + entry->bytes - start <= RUN_MAX;
}

/* Behind the one before; the first of a run at a page. */
static bool place_packed(struct zip_entry *entry, uint64_t bytes, uint64_t *start, uint64_t *end)
{
	uint64_t at = *end;

	if (*start && place(entry, at, bytes, SMALL_ALIGN, end) && is_in_run(entry, *start))
		return true;
	*start = align(at, PAGE);
	return place(entry, *start, bytes, SMALL_ALIGN, end);
}

static int lay_out(struct layout *layout)
{
	const struct pen_torch_content *content = layout->content;
	struct pen_torch_save *save = layout->save;
	struct zip_entry *entry = save->entries;
	uint64_t at = 0, run = 0;
	bool fits = true;

	for (size_t i = 0; fits && i < layout->part_count; i++)
		fits = place(entry++, at, layout->parts[i].length, SMALL_ALIGN, &at);
	save->front_length = at;
	for (size_t i = 0; fits && i < content->storage_count; i++, entry++) {
		uint64_t bytes = content->storages[save->order[i]].bytes;

		if (i < save->packed_count)
			fits = place_packed(entry, bytes, &run, &at);
		else
			fits = place(entry, align(at, PAGE), bytes, PAGE, &at);
		save->table.places = torch_places(save->table.places, entry->offset, entry->bytes);
		save->table.count += torch_chunks(save->table.chunk, entry->offset, entry->bytes);
	}
	save->tail_start = align(at, PAGE);
	fits = fits && place(entry, save->tail_start,
			     TORCH_TABLE_HEAD + 8 * save->table.count, SMALL_ALIGN, &at);
	if (!fits) {
		error_sys(layout->err, -EFBIG, "save", layout->path, -1);
		return -EFBIG;
	}
	/* Entries of the directory have the same size whatever the CRC32s will be. */
	for (struct zip_entry *each = save->entries; each <= entry; each++) {
		unsigned char bytes[ZIP_PUT_ENTRY(NAME_MAX_BYTES)];

		at += zip_put_entry(bytes, each);
	}
	save->size = at + ZIP_PUT_END;
	return 0;
}

/* ------------------------------------------------------------------------------- first job -- */

static int fill_front(struct layout *layout)
{
	struct pen_torch_save *save = layout->save;

	save->front = os_calloc(1, (size_t)save->front_length);
	save->tail = os_calloc(1, (size_t)(save->size - save->tail_start));
	if (!save->front || !save->tail)
		return no_memory(layout->path, layout->err);
	for (size_t i = 0; i < layout->part_count; i++) {
		struct zip_entry *entry = &save->entries[i];
		const struct pen_torch_part *part = &layout->parts[i];

		entry->crc32 = (uint32_t)digest_kind(PEN_DIGEST_CRC32)->of(part->bytes,
									   part->length);
		zip_put_local(save->front + entry->header, entry);
		if (part->length)
			memcpy(save->front + entry->offset, part->bytes, part->length);
	}
	return 0;
}

static bool is_cufile(int transfer)
{
	return transfer == PEN_GPU_DIRECT ||
	       (transfer >= PEN_GPU_DIRECT_ASYNC && transfer <= PEN_GPU_BATCH_STREAM);
}

/*
 * Front and storages. The room between them - the end of a page, the page of a header - is filled
 * as well, so that all is one run of whole blocks. Not with cuFile, which would write the page that
 * a storage ends on twice at the same time: there the space that was reserved is zeros already.
 */
static size_t put_extents(const struct layout *layout, bool fill, struct pen_extent *extents)
{
	struct pen_torch_save *save = layout->save;
	const struct pen_torch_storage *storages = layout->content->storages;
	uint64_t at = save->front_length, end, group = 0;
	size_t count = 1;

	if (save->storage_count)
		group = storages[save->order[0]].group;
	extents[0] = (struct pen_extent){
		.object = save->object, .memory = save->front, .length = save->front_length,
		.device = save->host, .group = group,
	};
	/* Front and last page are cut off, too: in a chunk that ends elsewhere they were unseen. */
	torch_digests_cut(&save->digests, 0, save->front_length);
	for (size_t i = 0; i <= save->storage_count; i++) {
		const struct zip_entry *entry = &save->entries[save->part_count + i];
		const struct pen_torch_storage *storage;
		bool last = i == save->storage_count;

		end = last ? save->tail_start : entry->offset;
		storage = last ? NULL : &storages[save->order[i]];
		group = last ? group : storage->group;
		if (fill && end > at)
			extents[count++] = (struct pen_extent){
				.object = save->object, .offset = at, .length = end - at,
				.flags = PEN_FILL, .group = group,
			};
		if (last) {
			torch_digests_cut(&save->digests, at, end - at);
			break;
		}
		extents[count++] = (struct pen_extent){
			.object = save->object, .offset = entry->offset,
			.memory = (void *)storage->memory, .length = storage->bytes,
			.device = storage->device, .group = group,
		};
		torch_digests_cut(&save->digests, entry->offset, entry->bytes);
		at = entry->offset + entry->bytes;
	}
	return count;
}

static int start_job(const struct layout *layout, struct pen_device *device,
		     const struct pen_options *given)
{
	struct pen_torch_save *save = layout->save;
	struct pen_options options = *given;
	struct pen_extent *extents = os_calloc(2 * save->storage_count + 3, sizeof(extents[0]));
	size_t count;
	int rc;

	if (!extents || torch_digests_init(&save->digests, save->object, save->table.chunk,
					   save->tail_start, 2 * save->storage_count + 4)) {
		free(extents);
		return no_memory(layout->path, layout->err);
	}
	count = put_extents(layout, !is_cufile(options.transfer), extents);
	options.digests = &save->digests;
	options.digest_count = 1;
	rc = pen_job_start(PEN_WRITE, device ? device : save->host, extents, count, &options,
			   &save->job, layout->err);
	free(extents);
	return rc;
}

static void save_free(struct pen_torch_save *save)
{
	torch_digests_fini(&save->digests);
	pen_object_close(save->object);
	pen_device_close(save->host);
	torch_pack_free(save->pack);
	free(save->entries);
	free(save->order);
	free(save->names);
	free(save->front);
	free(save->tail);
	free(save);
}

static int start(struct layout *layout, struct pen_device *device,
		 const struct pen_options *options)
{
	struct pen_torch_save *save = layout->save;
	int rc = order_storages(layout, is_cufile(options->transfer));

	if (!rc)
		rc = name_entries(layout);
	if (!rc)
		rc = lay_out(layout);
	if (!rc)
		rc = fill_front(layout);
	if (!rc)
		rc = pen_device_open("host", &save->host, layout->err);
	if (!rc)
		rc = pen_object_open(layout->path, PEN_WRITE, save->size, &save->object,
				     layout->err);
	return rc ? rc : start_job(layout, device, options);
}

/* What torch.load wants and the caller did not give. */
static int add_parts(struct layout *layout, struct pen_torch_part **parts)
{
	static const struct pen_torch_part wanted[] = {
		{ .name = "byteorder", .bytes = "little", .length = 6 },
		{ .name = "version", .bytes = "3\n", .length = 2 },
	};
	const struct pen_torch_content *content = layout->content;
	size_t count = content->part_count;

	*parts = os_calloc(count + 2, sizeof(**parts));
	if (!*parts)
		return no_memory(layout->path, layout->err);
	if (count)
		memcpy(*parts, content->parts, count * sizeof(**parts));
	for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++)
		if (!find_part(layout, wanted[i].name))
			(*parts)[count++] = wanted[i];
	layout->parts = *parts;
	layout->part_count = count;
	return 0;
}

/* NULL without memory. */
static struct pen_torch_save *save_new(const struct pen_options *options)
{
	struct pen_torch_save *save = os_calloc(1, sizeof(*save));

	if (!save)
		return NULL;
	save->started = os_now();
	save->groups = options->groups;
	save->table.chunk = torch_chunk(options, TORCH_CHUNK);
	save->options = (struct pen_options){
		.size = sizeof(*options), .cache = options->cache,
		.memory_limit = options->memory_limit, .request_size = options->request_size,
		.lanes = options->lanes, .depth = options->depth,
	};
	return save;
}

int pen_torch_save_start(const char *path, struct pen_device *device,
			 const struct pen_torch_content *content,
			 const struct pen_options *options, struct pen_torch_save **save,
			 struct pen_error *err)
{
	struct layout layout = { .content = content, .path = path, .err = err };
	struct pen_torch_part *parts = NULL;
	struct pen_options own;
	int rc;

	*save = NULL;
	error_clear(err);
	rc = schedule_options(options, &own, err);
	if (!rc)
		rc = check_content(&layout, &own);
	if (!rc)
		rc = add_parts(&layout, &parts);
	if (rc)
		return rc;
	layout.save = save_new(&own);
	if (!layout.save) {
		free(parts);
		return no_memory(path, err);
	}
	name_archive(&layout);
	if (content->archive)
		strcpy(layout.archive, content->archive);
	layout.save->part_count = layout.part_count;
	layout.save->storage_count = content->storage_count;
	rc = start(&layout, device, &own);
	free(parts);
	if (rc)
		save_free(layout.save);
	else
		*save = layout.save;
	return rc;
}

/* ------------------------------------------------------------------------- several objects -- */

static int start_pack(struct pen_torch_save *save, const char *path, struct pen_device *device,
		      const struct pen_options *given, struct pen_error *err)
{
	const struct torch_pack *pack = save->pack;
	struct pen_options options = *given;
	struct pen_extent *extents;
	size_t count;
	int rc = pen_device_open("host", &save->host, err);

	if (!rc)
		rc = pen_object_open(path, PEN_WRITE, pack->size, &save->object, err);
	if (rc)
		return rc;
	extents = os_calloc(3 * pack->storage_count + 1, sizeof(extents[0]));
	if (!extents || torch_digests_init(&save->digests, save->object, save->table.chunk,
					   pack->size, 4 * pack->storage_count + 2)) {
		free(extents);
		return no_memory(path, err);
	}
	count = torch_pack_extents(pack, save->object, save->host, !is_cufile(options.transfer),
				   &save->digests, extents);
	options.digests = &save->digests;
	options.digest_count = 1;
	rc = pen_job_start(PEN_WRITE, device ? device : save->host, extents, count, &options,
			   &save->job, err);
	free(extents);
	return rc;
}

int pen_torch_pack_start(const char *path, struct pen_device *device,
			 struct pen_torch_item *items, size_t count,
			 const struct pen_options *options, struct pen_torch_save **save,
			 struct pen_error *err)
{
	struct pen_torch_save *new;
	struct pen_options own;
	int rc;

	*save = NULL;
	error_clear(err);
	rc = schedule_options(options, &own, err);
	if (!rc)
		rc = check_options(path, &own, err);
	if (rc)
		return rc;
	new = save_new(&own);
	if (!new)
		return no_memory(path, err);
	rc = torch_pack_new(path, items, count, new->table.chunk, &new->pack, err);
	if (!rc)
		rc = start_pack(new, path, device, &own, err);
	if (rc)
		save_free(new);
	else
		*save = new;
	return rc;
}

struct pen_job *pen_torch_save_job(const struct pen_torch_save *save)
{
	return save->job;
}

/* Has the job ended otherwise than well? */
static bool job_failed(struct pen_job *job)
{
	struct pen_progress progress;

	pen_job_poll(job, &progress);
	return progress.state == PEN_FAILED || progress.state == PEN_CANCELLED;
}

int pen_torch_save_gathered(struct pen_torch_save *save, double seconds)
{
	double wait = seconds > 0 ? (seconds < 1e9 ? seconds : 1e9) : 0;
	uint64_t now = os_now(), until = now + (uint64_t)(wait * 1e9), told[64];
	bool failed;
	int rc = 0;

	if (!save->groups)
		rc = pen_job_wait_for(save->job, wait);
	if (!save->groups && !rc)
		return job_failed(save->job) ? -ECANCELED : 0;
	while (!rc && save->gathered < save->groups) {
		/* Asked first: nothing is gathered after the end. */
		failed = job_failed(save->job);
		save->gathered += pen_job_gathered(save->job, told, 64,
						   until > now ? (double)(until - now) / 1e9 : 0);
		now = os_now();
		if (save->gathered < save->groups)
			rc = failed ? -ECANCELED : now < until ? 0 : -ETIMEDOUT;
	}
	return rc;
}

/* ------------------------------------------------------------------------ what had to wait -- */

/* What the first job's report has of the others; the paths are those of the first, which moved the
 * storages. */
static void add_report(struct pen_report *report, const struct pen_report *rest)
{
	report->bytes += rest->bytes;
	report->storage_bytes += rest->storage_bytes;
	report->cpu_seconds += rest->cpu_seconds;
	report->requests += rest->requests;
	report->retries += rest->retries;
}

/* A chunk that nobody saw on its way is read back; `at` is in a storage. */
static int read_back(struct pen_torch_save *save, uint64_t index, uint64_t at, size_t length,
		     unsigned char **buffer, struct pen_error *err)
{
	int rc;

	if (!*buffer)
		*buffer = os_calloc(1, (size_t)save->table.chunk);
	if (!*buffer)
		return no_memory(save->object->name, err);
	rc = object_read(save->object, *buffer, length, at, err);
	if (!rc)
		save->digests.values[index] = digest_kind(PEN_DIGEST_CRC32)->of(*buffer, length);
	return rc;
}

/* The CRC32s of storages from those of their chunks, which go into the table as they are. */
static int sum_entries(struct pen_torch_save *save, struct zip_entry *entries, size_t count,
		       unsigned char *to, unsigned char **buffer, struct pen_error *err)
{
	int rc = 0;

	for (size_t i = 0; !rc && i < count; i++) {
		struct zip_entry *entry = &entries[i];
		uint64_t at = entry->offset, end = at + entry->bytes, chunk = save->table.chunk;
		uint64_t index = torch_digests_first(&save->digests, at), crc32 = 0;

		for (uint64_t length; !rc && at < end; at += length, index++) {
			length = chunk - at % chunk < end - at ? chunk - at % chunk : end - at;
			if (save->digests.states[index] != PEN_CHUNK_DIGESTED)
				rc = read_back(save, index, at, (size_t)length, buffer, err);
			crc32 = digest_crc32_join(crc32, save->digests.values[index], length);
			to = zip_put(to, save->digests.values[index], 8);
		}
		entry->crc32 = (uint32_t)crc32;
	}
	return rc;
}

static int sum_up(struct pen_torch_save *save, struct pen_error *err)
{
	const struct zip_entry *table = &save->entries[save->part_count + save->storage_count];
	unsigned char *to = save->tail + (table->offset - save->tail_start), *buffer = NULL;
	int rc;

	torch_table_put(to, &save->table);
	rc = sum_entries(save, save->entries + save->part_count, save->storage_count,
			 to + TORCH_TABLE_HEAD, &buffer, err);
	free(buffer);
	return rc;
}

static void fill_tail(struct pen_torch_save *save)
{
	size_t count = save->part_count + save->storage_count + 1;
	struct zip_entry *table = &save->entries[count - 1];
	unsigned char *content = save->tail + (table->offset - save->tail_start), *at;
	struct zip_end end = { .directory = table->offset + table->bytes, .count = count };

	table->crc32 = (uint32_t)digest_kind(PEN_DIGEST_CRC32)->of(content, (size_t)table->bytes);
	zip_put_local(save->tail, table);
	at = content + table->bytes;
	for (size_t i = 0; i < count; i++)
		at += zip_put_entry(at, &save->entries[i]);
	end.length = (uint64_t)(at - content) - table->bytes;
	zip_put_end(at, &end);
}

/* The packed storages of one run, from entry `first` up to `last`, with their headers. */
static int write_run(struct pen_torch_save *save, const struct zip_entry *first,
		     const struct zip_entry *last, unsigned char *buffer,
		     struct pen_report *report, struct pen_error *err)
{
	uint64_t start = first->header;
	struct pen_extent extent = {
		.object = save->object, .offset = start, .memory = buffer,
		.length = align(last[-1].offset + last[-1].bytes, PAGE) - start,
	};
	int rc = object_read(save->object, buffer, (size_t)extent.length, start, err);

	if (rc)
		return rc;
	for (const struct zip_entry *entry = first; entry < last; entry++)
		zip_put_local(buffer + (entry->header - start), entry);
	return pen_transfer(PEN_WRITE, save->host, &extent, 1, &save->options, report, err);
}

static int write_packed(struct pen_torch_save *save, struct pen_report *rest,
			struct pen_error *err)
{
	const struct zip_entry *first = save->entries + save->part_count, *last;
	const struct zip_entry *end = first + save->packed_count;
	unsigned char *buffer = NULL;
	int rc = 0;

	if (save->packed_count && !(buffer = os_calloc(1, RUN_MAX)))
		return no_memory(save->object->name, err);
	for (; !rc && first < end; first = last) {
		struct pen_report report = PEN_REPORT_INIT;

		for (last = first + 1; last < end && is_in_run(last, first->header);)
			last++;
		rc = write_run(save, first, last, buffer, &report, err);
		add_report(rest, &report);
	}
	free(buffer);
	return rc;
}

/* The headers' pages, each a header and zeros, and the tail. */
static int write_rest(struct pen_torch_save *save, struct pen_report *rest, struct pen_error *err)
{
	const struct zip_entry *storages = save->entries + save->part_count + save->packed_count;
	size_t storage_count = save->storage_count - save->packed_count, count = 0, room = 1;
	struct pen_extent *extents = os_calloc(2 * storage_count + 1, sizeof(extents[0]));
	struct pen_report report = PEN_REPORT_INIT;
	unsigned char *headers, *header;
	int rc;

	for (size_t i = 0; i < storage_count; i++)
		room += ZIP_PUT_LOCAL(storages[i].name_length);
	headers = header = os_calloc(1, room);
	if (!extents || !headers) {
		free(extents);
		free(headers);
		return no_memory(save->object->name, err);
	}
	for (size_t i = 0; i < storage_count; i++) {
		const struct zip_entry *entry = &storages[i];
		size_t length = zip_put_local(header, entry);

		extents[count++] = (struct pen_extent){
			.object = save->object, .offset = entry->header, .memory = header,
			.length = length,
		};
		extents[count++] = (struct pen_extent){
			.object = save->object, .offset = entry->header + length,
			.length = entry->offset - entry->header - length, .flags = PEN_FILL,
		};
		header += length;
	}
	extents[count++] = (struct pen_extent){
		.object = save->object, .offset = save->tail_start, .memory = save->tail,
		.length = save->size - save->tail_start,
	};
	rc = pen_transfer(PEN_WRITE, save->host, extents, count, &save->options, &report, err);
	add_report(rest, &report);
	free(extents);
	free(headers);
	return rc;
}

static int sum_up_pack(struct pen_torch_save *save, struct pen_error *err)
{
	struct torch_pack *pack = save->pack;
	unsigned char *buffer = NULL;
	int rc = 0;

	for (size_t i = 0; !rc && i < pack->zip_count; i++) {
		struct torch_pack_zip *zip = &pack->zips[i];

		rc = sum_entries(save, zip->entries + zip->first_storage, zip->storage_count,
				 zip->table_bytes + TORCH_TABLE_HEAD, &buffer, err);
	}
	free(buffer);
	return rc;
}

/* All that is not a storage of a file of several objects. */
static int write_gaps(struct pen_torch_save *save, struct pen_report *report,
		      struct pen_error *err)
{
	const struct torch_pack *pack = save->pack;
	struct pen_extent *extents = os_calloc(pack->storage_count + 1, sizeof(extents[0]));
	size_t count = 0;
	int rc;

	if (!extents)
		return no_memory(save->object->name, err);
	torch_pack_seal(save->pack);
	for (size_t i = 0; i <= pack->storage_count; i++)
		if (pack->gaps[i].length)
			extents[count++] = (struct pen_extent){
				.object = save->object, .offset = pack->gaps[i].offset,
				.memory = pack->gaps[i].bytes, .length = pack->gaps[i].length,
			};
	rc = pen_transfer(PEN_WRITE, save->host, extents, count, &save->options, report, err);
	free(extents);
	return rc;
}

static int finish(struct pen_torch_save *save, struct pen_report *rest, struct pen_error *err)
{
	int rc = save->pack ? sum_up_pack(save, err) : sum_up(save, err);

	if (!rc && save->pack) {
		rc = write_gaps(save, rest, err);
	} else if (!rc) {
		fill_tail(save);
		rc = write_packed(save, rest, err);
		if (!rc)
			rc = write_rest(save, rest, err);
	}
	return rc ? rc : pen_object_commit(save->object, err);
}

int pen_torch_save_wait(struct pen_torch_save *save, struct pen_report *report,
			struct pen_error *err)
{
	struct pen_report full = PEN_REPORT_INIT, rest = PEN_REPORT_INIT;
	bool cancelled;
	int rc;

	error_clear(err);
	if (report && !report->size)
		return error_set(err, -EINVAL, "fill in", "the report", -1, "its size is not set");
	/* The job may have ended before, and what it wrote must not be committed either. */
	cancelled = atomic_load(&save->job->cancelled);
	rc = pen_job_wait(save->job, &full, err);
	if (!rc && cancelled)
		rc = error_set(err, -ECANCELED, "finish", "the save", -1, "it was cancelled");
	if (!rc)
		rc = finish(save, &rest, err);
	add_report(&full, &rest);
	full.seconds = (double)(os_now() - save->started) / 1e9;
	full.gb_per_s = full.seconds > 0 ? (double)full.bytes / full.seconds / 1e9 : 0;
	if (report) {
		full.size = report->size;
		memcpy(report, &full, full.size < sizeof(full) ? full.size : sizeof(full));
	}
	save_free(save);
	return rc;
}
