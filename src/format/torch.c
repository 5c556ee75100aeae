/* SPDX-License-Identifier: MIT */
/*
 * Opening a file of torch's: the end of the zip, its directory, the header of every record. Then
 * the records have names without the archive's in front, as torch calls them. The pickle is looked
 * through when somebody asks for tensors, and each tensor is checked against its storage.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/digest.h"
#include "base/error.h"
#include "format/torch.h"
#include "format/words.h"
#include "io/object.h"
#include "sys/os.h"

#define PICKLE "data.pkl"
#define DAMAGED "The file is damaged or was not written by torch: copy or save it again"
#define PAGE 4096u

static int no_memory(const char *path, struct pen_error *err)
{
	return error_sys(err, -ENOMEM, "open", path, -1);
}

bool torch_is_storage(const struct pen_torch_record *record)
{
	return !strncmp(record->name, TORCH_STORAGE, strlen(TORCH_STORAGE));
}

/* ------------------------------------------------------------------------------- the zip -- */

/* What people give us in place of a zip of torch's. */
static int check_start(struct pen_torch *file, struct pen_error *err)
{
	unsigned char first[8] = { 0 };
	int rc = object_read(file->object, first, file->size < 8 ? (size_t)file->size : 8,
			     file->base, err);

	if (rc || !memcmp(first, "PK\3\4", 4))
		return rc;
	rc = words_bad(err, file->path, (int64_t)file->base,
		       "it is not a zip file, as torch.save writes");
	if (first[0] == 0x80)
		error_hint(err, "It is a pickle, as old files of torch.save are: use torch.load");
	else if (!memcmp(first, "version ", 8))
		error_hint(err, "It looks like a pointer of git-lfs: run git lfs pull");
	else if (first[0] == '<')
		error_hint(err, "It looks like a web page: the download went wrong");
	else
		error_hint(err, "%s", DAMAGED);
	return rc;
}

static int read_directory(struct pen_torch *file, struct pen_error *err)
{
	size_t length = file->size < ZIP_TAIL ? (size_t)file->size : ZIP_TAIL;
	unsigned char tail[ZIP_TAIL];
	struct zip_end end;
	void *directory;
	int rc = object_read(file->object, tail, length, file->base + file->size - length, err);

	if (!rc)
		rc = zip_find_end(file->path, tail, length, file->size, &end, err);
	if (rc)
		return rc;
	directory = os_calloc(1, (size_t)end.length);
	if (!directory)
		return no_memory(file->path, err);
	rc = object_read(file->object, directory, (size_t)end.length, file->base + end.directory,
			 err);
	if (!rc)
		rc = zip_parse(file->path, directory, &end, &file->zip, err);
	free(directory);
	return rc;
}

/* Each lies somewhere else: all are asked for before the first is waited for. */
static int read_headers(struct pen_torch *file, struct pen_error *err)
{
	struct zip *zip = file->zip;
	unsigned char *bytes = os_calloc(1, ZIP_LOCAL + ZIP_NAME_MAX + ZIP_LOCAL_SIZES);
	int rc = 0;

	if (!bytes)
		return no_memory(file->path, err);
	for (size_t i = 0; i < zip->count; i++)
		object_fetch(file->object, (file->base + zip->entries[i].header) / PAGE * PAGE,
			     PAGE);
	for (size_t i = 0; !rc && i < zip->count; i++) {
		rc = object_read(file->object, bytes, zip_local_length(zip, i),
				 file->base + zip->entries[i].header, err);
		if (!rc)
			rc = zip_check_local(file->path, zip, i, bytes, err);
	}
	free(bytes);
	return rc;
}

/* ------------------------------------------------------------------------------- records -- */

static int by_name(const void *left, const void *right)
{
	const struct pen_torch_record *a = *(struct pen_torch_record *const *)left;
	const struct pen_torch_record *b = *(struct pen_torch_record *const *)right;

	return strcmp(a->name, b->name);
}

/* All records lie in one folder, that of the first; torch would not see those that do not. */
static int name_records(struct pen_torch *file, struct pen_error *err)
{
	const struct zip *zip = file->zip;
	const char *first = zip->entries[zip->first].name, *slash = strchr(first, '/');
	size_t prefix = slash ? (size_t)(slash - first) + 1 : 0;

	for (size_t i = 0; i < zip->count; i++) {
		const struct zip_entry *entry = &zip->entries[i];
		struct pen_torch_record *record = &file->records[file->record_count];
		char shown[WORDS_NAME];

		if (!prefix || strncmp(entry->name, first, prefix)) {
			words_bad(err, file->path, (int64_t)entry->header,
				  "record %s is not in the folder of the others",
				  words_name(shown, entry->name));
			error_hint(err, "%s", DAMAGED);
			return -EBADMSG;
		}
		/* The folder itself, as some tools add it. */
		if (entry->name_length == prefix)
			continue;
		*record = (struct pen_torch_record){
			.name = entry->name + prefix, .offset = file->base + entry->offset,
			.bytes = entry->bytes, .crc32 = entry->crc32,
			.flags = entry->method ? PEN_TORCH_PACKED : 0,
		};
		file->by_name[file->record_count++] = record;
		if (!record->flags || (!torch_is_storage(record) && strcmp(record->name, PICKLE)))
			continue;
		words_bad(err, file->path, (int64_t)entry->header, "record %s is compressed",
			  words_name(shown, entry->name));
		error_hint(err, "Unpack it and save it again with torch.save, which does not");
		return -EBADMSG;
	}
	qsort(file->by_name, file->record_count, sizeof(file->by_name[0]), by_name);
	return 0;
}

static int check_pickle(struct pen_torch *file, struct pen_error *err)
{
	if (pen_torch_find(file, PICKLE))
		return 0;
	words_bad(err, file->path, 0, "it is a zip file, but has no " PICKLE);
	error_hint(err, "torch.load reads files that torch.save wrote");
	return -EBADMSG;
}

/* Object, base and size are set. */
static int read_zip(struct pen_torch *file, const char *path, struct pen_error *err)
{
	int rc;

	file->path = os_calloc(1, strlen(path) + 1);
	if (!file->path)
		return no_memory(path, err);
	strcpy(file->path, path);
	rc = check_start(file, err);
	if (!rc)
		rc = read_directory(file, err);
	if (!rc)
		rc = read_headers(file, err);
	if (rc)
		return rc;
	file->records = os_calloc(file->zip->count, sizeof(file->records[0]));
	file->by_name = os_calloc(file->zip->count, sizeof(file->by_name[0]));
	if (!file->records || !file->by_name)
		return no_memory(path, err);
	rc = name_records(file, err);
	return rc ? rc : check_pickle(file, err);
}

int pen_torch_open(const char *path, struct pen_torch **file, struct pen_error *err)
{
	struct pen_torch *new = os_calloc(1, sizeof(*new));
	int rc;

	*file = NULL;
	error_clear(err);
	if (!new)
		return no_memory(path, err);
	rc = pen_object_open(path, PEN_READ, 0, &new->object, err);
	if (!rc) {
		new->size = pen_object_size(new->object);
		rc = read_zip(new, path, err);
	}
	if (rc)
		pen_torch_close(new);
	else
		*file = new;
	return rc;
}

int pen_torch_open_item(struct pen_object *object, uint64_t offset, uint64_t size,
			struct pen_torch **file, struct pen_error *err)
{
	struct pen_torch *new;
	uint64_t end;
	int rc;

	*file = NULL;
	error_clear(err);
	if (__builtin_add_overflow(offset, size, &end) || end > pen_object_size(object)) {
		words_bad(err, object->name, -1, "it ends before the %llu bytes at %llu",
			  (unsigned long long)size, (unsigned long long)offset);
		error_hint(err, "%s", DAMAGED);
		return -EBADMSG;
	}
	new = os_calloc(1, sizeof(*new));
	if (!new)
		return no_memory(object->name, err);
	new->object = object;
	new->borrowed = true;
	new->base = offset;
	new->size = size;
	rc = read_zip(new, object->name, err);
	if (rc)
		pen_torch_close(new);
	else
		*file = new;
	return rc;
}

void pen_torch_close(struct pen_torch *file)
{
	if (!file)
		return;
	pickle_fini(&file->pickle);
	free(file->tensors);
	free(file->by_name);
	free(file->records);
	free(file->zip);
	if (!file->borrowed)
		pen_object_close(file->object);
	free(file->path);
	free(file);
}

struct pen_object *pen_torch_object(const struct pen_torch *file)
{
	return file->object;
}

size_t pen_torch_records(const struct pen_torch *file, const struct pen_torch_record **records)
{
	*records = file->records;
	return file->record_count;
}

const struct pen_torch_record *pen_torch_find(const struct pen_torch *file, const char *name)
{
	const struct pen_torch_record wanted = { .name = name }, *key = &wanted, **found;

	found = bsearch(&key, file->by_name, file->record_count, sizeof(file->by_name[0]), by_name);
	return found ? *found : NULL;
}

int pen_torch_read(const struct pen_torch *file, const struct pen_torch_record *record,
		   void *bytes, struct pen_error *err)
{
	int rc;

	error_clear(err);
	if (record->flags & PEN_TORCH_PACKED)
		return error_set(err, -ENOTSUP, "read", file->path, (int64_t)record->offset,
				 "record %s is compressed", record->name);
	rc = object_read(file->object, bytes, (size_t)record->bytes, record->offset, err);
	if (rc || !record->crc32 ||
	    digest_kind(PEN_DIGEST_CRC32)->of(bytes, (size_t)record->bytes) == record->crc32)
		return rc;
	error_vendor(err, -EILSEQ, PEN_DOMAIN_FORMAT, 0, "verify", file->path,
		     "record %s is not what was saved: its CRC32 differs", record->name);
	error_hint(err, "The file is damaged: take another copy of it");
	if (err)
		err->offset = (int64_t)record->offset;
	return -EILSEQ;
}

/* ------------------------------------------------------------------------------- tensors -- */

static int bad_tensor(const struct pen_torch *file, const struct pickle_tensor *from, uint64_t at,
		      const char *what, struct pen_error *err)
{
	char shown[WORDS_NAME];

	words_bad(err, file->path, (int64_t)at, "tensor %s %s",
		  words_text(shown, from->name, from->name_length), what);
	error_hint(err, "%s", DAMAGED);
	return -EBADMSG;
}

/* Bytes that `elements` take, rounded up; false on overflow. */
static bool bytes_of(uint64_t elements, unsigned int bits, uint64_t *bytes)
{
	if (bits % 8 == 0)
		return !__builtin_mul_overflow(elements, bits / 8, bytes);
	if (__builtin_mul_overflow(elements, bits, bytes))
		return false;
	*bytes = *bytes / 8 + (*bytes % 8 != 0);
	return true;
}

/* Elements of a tensor, and how many of its storage lead up to the end of its last one. */
static bool span(const struct pickle_tensor *from, uint64_t *elements, uint64_t *end)
{
	bool empty = false;

	for (uint32_t i = 0; i < from->rank; i++)
		empty |= !from->shape[i];
	*elements = !empty;
	*end = from->offset;
	for (uint32_t i = 0; !empty && i < from->rank; i++) {
		uint64_t step;

		if (__builtin_mul_overflow(*elements, from->shape[i], elements) ||
		    __builtin_mul_overflow(from->shape[i] - 1, from->stride[i], &step) ||
		    __builtin_add_overflow(*end, step, end))
			return false;
	}
	return empty || !__builtin_add_overflow(*end, 1, end);
}

static int resolve(struct pen_torch *file, const struct pickle_tensor *from,
		   struct pen_torch_tensor *tensor, struct pen_error *err)
{
	const struct pen_torch_record *pickle = pen_torch_find(file, PICKLE), *record;
	char name[sizeof(TORCH_STORAGE) + 64];
	uint64_t at = pickle->offset + from->at, elements, end, end_bytes, start;

	if (from->key_length > 64 || strlen(from->key) != from->key_length)
		return bad_tensor(file, from, at, "has a storage with no name", err);
	strcpy(stpcpy(name, TORCH_STORAGE), from->key);
	record = pen_torch_find(file, name);
	if (!record)
		return bad_tensor(file, from, at, "has a storage that is not in the file", err);
	if (!span(from, &elements, &end) ||
	    !bytes_of(elements, from->dtype->bits, &tensor->bytes) ||
	    !bytes_of(end, from->dtype->bits, &end_bytes) ||
	    !bytes_of(from->offset, from->dtype->bits, &start))
		return bad_tensor(file, from, at, "is larger than 64 bits can count", err);
	/* Of one without elements the offset is nothing that anybody goes to. */
	if (elements && end_bytes > record->bytes)
		return bad_tensor(file, from, at, "leaves its storage", err);
	tensor->name = from->name;
	tensor->name_length = from->name_length;
	tensor->type = from->dtype->name;
	tensor->location = from->location;
	tensor->dtype = from->dtype->dtype;
	tensor->item_bits = from->dtype->bits;
	tensor->rank = from->rank;
	tensor->shape = from->shape;
	tensor->stride = from->stride;
	tensor->offset = record->offset + (elements ? start : 0);
	tensor->record = (size_t)(record - file->records);
	return 0;
}

static int find_tensors(struct pen_torch *file, struct pen_error *err)
{
	const struct pen_torch_record *record = pen_torch_find(file, PICKLE);
	void *bytes;
	int rc = 0;

	if (record->bytes > PICKLE_MAX) {
		words_bad(err, file->path, (int64_t)record->offset,
			  "its pickle is larger than can be looked at");
		error_hint(err, "torch.load reads it all the same");
		return -EBADMSG;
	}
	bytes = os_calloc(1, (size_t)record->bytes + 1);
	if (!bytes)
		return no_memory(file->path, err);
	rc = pen_torch_read(file, record, bytes, err);
	if (!rc)
		rc = pickle_init(&file->pickle, file->path, bytes, (size_t)record->bytes,
				 record->offset, err);
	free(bytes);
	if (rc)
		return rc;
	file->tensors = os_calloc(file->pickle.count + 1, sizeof(file->tensors[0]));
	if (!file->tensors)
		return no_memory(file->path, err);
	for (size_t i = 0; !rc && i < file->pickle.count; i++)
		rc = resolve(file, &file->pickle.tensors[i], &file->tensors[i], err);
	return rc;
}

int pen_torch_tensors(struct pen_torch *file, const struct pen_torch_tensor **tensors,
		      size_t *count, struct pen_error *err)
{
	int rc = 0;

	*tensors = NULL;
	*count = 0;
	error_clear(err);
	if (!file->has_tensors) {
		rc = find_tensors(file, err);
		if (rc) {
			pickle_fini(&file->pickle);
			free(file->tensors);
			file->tensors = NULL;
			return rc;
		}
		file->has_tensors = true;
	}
	*tensors = file->tensors;
	*count = file->pickle.count;
	return 0;
}
