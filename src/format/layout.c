/* SPDX-License-Identifier: MIT */
/*
 * Which tensor lies where in which file: sizes -> files -> order and header of each file ->
 * offsets, and the index. All of it before any I/O, so that whoever writes - pen_save_start(), or a
 * program that makes the bytes as they go - writes the same.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "format/layout.h"
#include "format/safetensors_write.h"
#include "format/shards.h"
#include "format/words.h"
#include "sys/os.h"

#define ALIGN_LEAST 8u
#define ALIGN_MOST (1u << 20)

/* The public layout and what it points to; arrays are by number of tensor or file. */
struct layout {
	struct pen_layout shown;	/* first: freed by this address */
	struct pen_layout_file *files;
	struct pen_layout_place *places;
	char (*names)[SHARDS_NAME_MAX];	/* that were made here */
	const char **file_names;
	uint64_t *bytes;
	uint32_t *file_of;
	size_t *by_name;		/* tensors */
	size_t *order;			/* tensors, file by file */
	char *index;
};

int layout_options(const struct pen_save_options *given, struct pen_save_options *full,
		   struct pen_error *err)
{
	static const struct pen_save_options defaults = PEN_SAVE_OPTIONS_INIT;

	*full = defaults;
	if (given) {
		/* A caller compiled against an older header has a shorter struct. */
		size_t size = given->size < sizeof(*full) ? given->size : sizeof(*full);

		if (size < offsetof(struct pen_save_options, metadata))
			return error_set(err, -EINVAL, "use", "the options", -1,
					 "their size is not set");
		memcpy(full, given, size);
		for (size_t i = sizeof(*full); i < given->size; i++)
			if (((const unsigned char *)given)[i])
				return error_set(err, -EINVAL, "use", "the options", -1,
						 "this library is older than what they ask for");
	}
	if (!full->align)
		full->align = ALIGN_LEAST;
	if (full->align < ALIGN_LEAST || full->align > ALIGN_MOST ||
	    (full->align & (full->align - 1))) {
		error_set(err, -EINVAL, "align", "tensors", -1, "%llu is not possible",
			  (unsigned long long)full->align);
		error_hint(err, "Take 4096, or another power of two from 8 to 1 MiB");
		return -EINVAL;
	}
	if (full->file_count && full->shard_size)
		return error_set(err, -EINVAL, "use", "the options", -1,
				 "they count files and ask for shards by size");
	if (full->files && !full->file_count)
		return error_set(err, -EINVAL, "use", "the options", -1, "they name no file");
	return 0;
}

bool layout_is_folder(const struct pen_save_options *options)
{
	return options->file_count || options->shard_size;
}

static int no_memory(struct pen_error *err)
{
	return error_sys(err, -ENOMEM, "save", "a model", -1);
}

static int measure(struct layout *layout, const struct pen_save_tensor *tensors, size_t count,
		   struct pen_error *err)
{
	char shown[WORDS_NAME];

	for (size_t i = 0; i < count; i++) {
		int rc = safetensors_bytes(&tensors[i], &layout->bytes[i], err);

		if (rc)
			return rc;
		/* Room for headers, and signed where files have signed sizes. */
		if (__builtin_add_overflow(layout->shown.bytes, layout->bytes[i],
					   &layout->shown.bytes) ||
		    layout->shown.bytes > INT64_MAX / 2)
			return error_set(err, -EINVAL, "save",
					 words_text(shown, tensors[i].name,
						    safetensors_length(tensors[i].name,
								       tensors[i].name_length)),
					 -1, "together the tensors are too large for any store");
	}
	return 0;
}

static int name_order(const struct pen_save_tensor *a, const struct pen_save_tensor *b)
{
	return text_order(a->name, safetensors_length(a->name, a->name_length), b->name,
			  safetensors_length(b->name, b->name_length));
}

static int by_name(const void *left, const void *right, void *context)
{
	const struct pen_save_tensor *tensors = context;

	return name_order(&tensors[*(const size_t *)left], &tensors[*(const size_t *)right]);
}

static int check_names(struct layout *layout, const struct pen_save_tensor *tensors, size_t count,
		       struct pen_error *err)
{
	char shown[WORDS_NAME];

	for (size_t i = 0; i < count; i++)
		layout->by_name[i] = i;
	if (count)
		qsort_r(layout->by_name, count, sizeof(layout->by_name[0]), by_name,
			(void *)(uintptr_t)tensors);
	for (size_t i = 0; i + 1 < count; i++) {
		const struct pen_save_tensor *tensor = &tensors[layout->by_name[i]];

		if (!name_order(tensor, &tensors[layout->by_name[i + 1]]))
			return error_set(err, -EINVAL, "save",
					 words_text(shown, tensor->name,
						    safetensors_length(tensor->name,
								       tensor->name_length)),
					 -1, "two tensors have this name");
	}
	return 0;
}

/* A file for each tensor, and a name for each file. */
static int deal_out(struct layout *layout, const struct pen_save_tensor *tensors, size_t count,
		    const struct pen_save_options *options, struct pen_error *err)
{
	size_t files = options->file_count ? options->file_count : 1;

	for (size_t i = 0; i < count; i++) {
		layout->file_of[i] = options->file_count ? tensors[i].file : 0;
		if (layout->file_of[i] >= files)
			return error_set(err, -EINVAL, "save", tensors[i].name, -1,
					 "it is to be in file %u of %zu", tensors[i].file, files);
	}
	if (options->shard_size)
		files = shards_deal(layout->bytes, count, options->shard_size, layout->file_of);
	layout->shown.file_count = files;
	layout->files = os_calloc(files, sizeof(layout->files[0]));
	layout->file_names = os_calloc(files, sizeof(layout->file_names[0]));
	layout->names = os_calloc(files, sizeof(layout->names[0]));
	if (!layout->files || !layout->file_names || !layout->names)
		return no_memory(err);
	for (size_t i = 0; i < files && layout_is_folder(options); i++) {
		shards_name(i, files, layout->names[i]);
		layout->file_names[i] = options->files ? options->files[i] : layout->names[i];
		layout->files[i].name = layout->file_names[i];
	}
	return 0;
}

/* `order` file by file, each in the order of the caller. */
static void gather(struct layout *layout, size_t count)
{
	size_t at = 0;

	for (size_t i = 0; i < count; i++)
		layout->files[layout->file_of[i]].tensor_count++;
	for (size_t i = 0; i < layout->shown.file_count; i++) {
		layout->files[i].tensors = layout->order + at;
		at += layout->files[i].tensor_count;
		layout->files[i].tensor_count = 0;
	}
	for (size_t i = 0; i < count; i++) {
		struct pen_layout_file *file = &layout->files[layout->file_of[i]];

		layout->order[(size_t)(file->tensors - layout->order) + file->tensor_count++] = i;
	}
}

static int write_header(struct layout *layout, size_t number, const struct pen_save_tensor *tensors,
			const struct pen_save_options *options, struct pen_error *err)
{
	struct pen_layout_file *file = &layout->files[number];
	struct safetensors_file made = {
		.name = file->name ? file->name : "a file",
		.tensors = tensors,
		.bytes = layout->bytes,
		.order = layout->order + (file->tensors - layout->order),
		.count = file->tensor_count,
		.metadata = options->metadata,
		.metadata_count = options->metadata_count,
		.align = options->align,
	};
	char *header;
	size_t size;
	int rc = safetensors_write(&made, &header, &size, err);

	if (rc)
		return rc;
	file->header = header;
	file->size = file->header_size = size;
	for (size_t i = 0; i < file->tensor_count; i++) {
		size_t tensor = file->tensors[i];

		layout->places[tensor] = (struct pen_layout_place){
			.file = number, .offset = file->size, .bytes = layout->bytes[tensor],
		};
		file->size += layout->bytes[tensor];
	}
	return 0;
}

static int lay_out(struct layout *layout, const struct pen_save_tensor *tensors, size_t count,
		   const struct pen_save_options *options, struct pen_error *err)
{
	int rc = measure(layout, tensors, count, err);

	if (!rc)
		rc = check_names(layout, tensors, count, err);
	if (!rc)
		rc = deal_out(layout, tensors, count, options, err);
	if (rc)
		return rc;
	gather(layout, count);
	for (size_t i = 0; !rc && i < layout->shown.file_count; i++)
		rc = write_header(layout, i, tensors, options, err);
	if (!rc && layout_is_folder(options))
		rc = shards_index(tensors, layout->by_name, count, layout->file_of,
				  layout->file_names, layout->shown.bytes, &layout->index,
				  &layout->shown.index_size, err);
	layout->shown.files = layout->files;
	layout->shown.places = layout->places;
	layout->shown.index = layout->index;
	return rc;
}

int pen_layout_make(const struct pen_save_tensor *tensors, size_t count,
		    const struct pen_save_options *options, struct pen_layout **layout,
		    struct pen_error *err)
{
	struct pen_save_options full;
	struct layout *new;
	int rc;

	error_clear(err);
	*layout = NULL;
	rc = layout_options(options, &full, err);
	if (rc)
		return rc;
	new = os_calloc(1, sizeof(*new));
	if (!new)
		return no_memory(err);
	/* At least one of each, as nothing at all may be saved too. */
	new->places = os_calloc(count + 1, sizeof(new->places[0]));
	new->bytes = os_calloc(count + 1, sizeof(new->bytes[0]));
	new->file_of = os_calloc(count + 1, sizeof(new->file_of[0]));
	new->by_name = os_calloc(count + 1, sizeof(new->by_name[0]));
	new->order = os_calloc(count + 1, sizeof(new->order[0]));
	if (new->places && new->bytes && new->file_of && new->by_name && new->order)
		rc = lay_out(new, tensors, count, &full, err);
	else
		rc = no_memory(err);
	if (rc)
		pen_layout_free(&new->shown);
	else
		*layout = &new->shown;
	return rc;
}

void pen_layout_free(struct pen_layout *layout)
{
	struct layout *own = (struct layout *)layout;

	if (!own)
		return;
	for (size_t i = 0; own->files && i < own->shown.file_count; i++)
		free((void *)(uintptr_t)own->files[i].header);
	free(own->files);
	free(own->places);
	free(own->names);
	free(own->file_names);
	free(own->bytes);
	free(own->file_of);
	free(own->by_name);
	free(own->order);
	free(own->index);
	free(own);
}
