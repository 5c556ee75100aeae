/* SPDX-License-Identifier: MIT */
/*
 * Listing a file of torch's: its records as the zip has them, the tensors that its pickle
 * describes, and what it can be verified by.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/error.h"
#include "base/text.h"
#include "commands.h"
#include "inspect_torch.h"
#include "keys.h"
#include "report.h"

#define NAME_WIDTH 60		/* longer names push their line to the right */

struct listing {
	const char *path;
	struct pen_torch *file;
	const struct pen_torch_record *records;
	size_t record_count;
	const struct pen_torch_tensor **tensors;	/* those asked for */
	size_t count;
	uint64_t bytes;
};

bool inspect_is_torch(const char *path)
{
	/* One that is no file, a pipe say, must not hold us up. */
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	char first[4];
	bool is = fd >= 0 && read(fd, first, 4) == 4 && !memcmp(first, "PK\3\4", 4);

	if (fd >= 0)
		close(fd);
	return is;
}

const char *inspect_torch_by(int by)
{
	static const char *const words[] = { "nothing", "crc32", "digests" };

	return words[by];
}

/* ----------------------------------------------------------------------------------- JSON -- */

static json_t *numbers_json(const uint64_t *numbers, uint32_t count)
{
	json_t *list = json_array();

	for (uint32_t i = 0; i < count; i++)
		json_array_append_new(list, report_number(numbers[i]));
	return list;
}

static json_t *record_json(const struct pen_torch_record *record)
{
	json_t *object = json_object();

	json_object_set_new(object, "name", report_text(record->name));
	json_object_set_new(object, "offset", report_number(record->offset));
	json_object_set_new(object, "bytes", report_number(record->bytes));
	json_object_set_new(object, "crc32", report_number(record->crc32));
	json_object_set_new(object, "packed", json_boolean(record->flags & PEN_TORCH_PACKED));
	return object;
}

static json_t *tensor_json(const struct listing *list, const struct pen_torch_tensor *tensor)
{
	json_t *object = json_object();

	json_object_set_new(object, "name", report_text_bytes(tensor->name, tensor->name_length));
	json_object_set_new(object, "dtype", json_string(tensor->type));
	json_object_set_new(object, "shape", numbers_json(tensor->shape, tensor->rank));
	json_object_set_new(object, "stride", numbers_json(tensor->stride, tensor->rank));
	json_object_set_new(object, "bytes", report_number(tensor->bytes));
	json_object_set_new(object, "record", report_text(list->records[tensor->record].name));
	json_object_set_new(object, "offset", report_number(tensor->offset));
	return object;
}

static void print_json(const struct listing *list)
{
	json_t *object = json_object(), *records = json_array(), *tensors = json_array();
	json_t *total = json_object();

	for (size_t i = 0; i < list->record_count; i++)
		json_array_append_new(records, record_json(&list->records[i]));
	for (size_t i = 0; i < list->count; i++)
		json_array_append_new(tensors, tensor_json(list, list->tensors[i]));
	json_object_set_new(total, "tensors", report_number(list->count));
	json_object_set_new(total, "bytes", report_number(list->bytes));
	json_object_set_new(object, "model", report_text(list->path));
	json_object_set_new(object, "records", records);
	json_object_set_new(object, "tensors", tensors);
	json_object_set_new(object, "total", total);
	json_object_set_new(object, "verifiable",
			    json_string(inspect_torch_by(pen_torch_verifiable(list->file))));
	report_json(object);
}

/* --------------------------------------------------------------------------------- people -- */

static int name_width(const struct listing *list)
{
	size_t width = 4;

	for (size_t i = 0; i < list->count; i++) {
		size_t length = text_escape_bytes(NULL, 0, list->tensors[i]->name,
						  list->tensors[i]->name_length);

		if (length > width)
			width = length;
	}
	return width < NAME_WIDTH ? (int)width : NAME_WIDTH;
}

static void print_tensors(const struct listing *list)
{
	int width = name_width(list);

	printf("\n  %-*s  %-11s  %-16s  %13s  %14s  %s\n", width, "name", "dtype", "shape", "bytes",
	       "offset", "record");
	for (size_t i = 0; i < list->count; i++) {
		const struct pen_torch_tensor *tensor = list->tensors[i];

		printf("  ");
		report_name_bytes(tensor->name, tensor->name_length, width);
		printf("  %-11s  ", tensor->type);
		report_shape(tensor->shape, tensor->rank, 16);
		printf("  %13llu  %14llu  ", (unsigned long long)tensor->bytes,
		       (unsigned long long)tensor->offset);
		report_name(list->records[tensor->record].name, 0);
		putchar('\n');
	}
}

static void print_text(const struct listing *list)
{
	static const char *const by[] = {
		[PEN_TORCH_BY_NOTHING] = "nothing: it was saved without CRC32s",
		[PEN_TORCH_BY_CRC32] = "the CRC32 of each record",
		[PEN_TORCH_BY_TABLE] = "digests of its chunks, and the CRC32 of each record",
	};
	char size[REPORT_BYTES_MAX];

	report_name(list->path, 0);
	printf("\n  a file of torch.save: %zu records, %s\n", list->record_count,
	       report_bytes(pen_object_size(pen_torch_object(list->file)), size, sizeof(size)));
	printf("  it can be verified by %s\n", by[pen_torch_verifiable(list->file)]);
	if (list->count)
		print_tensors(list);
	printf("\n  %zu %s, %s (%llu bytes)\n", list->count,
	       list->count == 1 ? "tensor" : "tensors",
	       report_bytes(list->bytes, size, sizeof(size)), (unsigned long long)list->bytes);
}

/* ----------------------------------------------------------------------------- the listing -- */

static int find(struct listing *list, const struct option_list *keys, struct pen_error *err)
{
	const struct pen_torch_tensor *tensors;
	size_t count;
	int rc = pen_torch_open(list->path, &list->file, err);

	if (!rc)
		rc = pen_torch_tensors(list->file, &tensors, &count, err);
	if (rc)
		return rc;
	list->record_count = pen_torch_records(list->file, &list->records);
	list->tensors = calloc(count + 1, sizeof(list->tensors[0]));
	if (!list->tensors)
		return error_sys(err, -ENOMEM, "list", list->path, -1);
	for (size_t i = 0; i < count; i++) {
		if (!keys_match(keys, tensors[i].name, tensors[i].name_length))
			continue;
		list->tensors[list->count++] = &tensors[i];
		list->bytes += tensors[i].bytes;
	}
	if (!keys->count || list->count)
		return 0;
	error_set(err, -ENOENT, "find tensors in", list->path, -1,
		  "none of its %zu tensors is matched by '%.100s'%s", count, keys->items[0],
		  keys->count > 1 ? " or the other globs" : "");
	error_hint(err, "'penstock inspect' without --keys lists them");
	return -ENOENT;
}

int inspect_torch(const char *path, const struct option_list *keys, bool json)
{
	struct listing list = { .path = path };
	struct pen_error err;
	int rc = find(&list, keys, &err);

	if (rc)
		report_error(&err, json);
	else if (json)
		print_json(&list);
	else
		print_text(&list);
	free(list.tensors);
	pen_torch_close(list.file);
	return rc ? STATUS_FAILURE : STATUS_OK;
}
