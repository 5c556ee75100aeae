/* SPDX-License-Identifier: MIT */
/* From boxes of coded tensors to extents of chunks; see coded_load.h. */
#include <errno.h>
#include <stdlib.h>
#include "base/error.h"
#include "format/coded.h"
#include "format/coded_load.h"
#include "format/words.h"
#include "io/object.h"
#include "sys/os.h"

/* A coding of ours, and whom to name when a chunk of it is damaged. */
struct item {
	struct coding coding;
	const char *file;
	const struct pen_tensor *tensor;
};

struct coded_load {
	struct pen_model *model;
	struct coded_chunks *chunks;	/* of each file of the model */
	unsigned char **wanted;		/* of each file, which of its tensors; or NULL: none */
	struct item *items;		/* of each extent that is coded; others are all 0 */
	const struct coding **codings;	/* the same as the engine wants it */
};

int coded_load_new(struct pen_model *model, size_t room, struct coded_load **load,
		   struct pen_error *err)
{
	struct coded_load *new = os_calloc(1, sizeof(*new));

	*load = new;
	if (new) {
		new->model = model;
		new->chunks = os_calloc(model->file_count + 1, sizeof(new->chunks[0]));
		new->wanted = os_calloc(model->file_count + 1, sizeof(new->wanted[0]));
		new->items = os_calloc(room + 1, sizeof(new->items[0]));
		new->codings = os_calloc(room + 1, sizeof(new->codings[0]));
	}
	if (new && new->chunks && new->wanted && new->items && new->codings)
		return 0;
	coded_load_free(new);
	*load = NULL;
	return error_sys(err, -ENOMEM, "load", "the tensors", -1);
}

void coded_load_free(void *load)
{
	struct coded_load *old = load;

	if (!old)
		return;
	for (size_t i = 0; old->chunks && i < old->model->file_count; i++)
		coded_chunks_fini(&old->chunks[i]);
	for (size_t i = 0; old->wanted && i < old->model->file_count; i++)
		free(old->wanted[i]);
	free(old->chunks);
	free(old->wanted);
	free(old->items);
	free(old->codings);
	free(old);
}

const struct coding *const *coded_load_codings(const struct coded_load *load)
{
	return load->codings;
}

static void damaged(const struct coding *coding, uint64_t chunk, struct pen_error *err)
{
	const struct item *item = coding->context;

	coded_damaged(item->file, item->tensor, chunk, coding->offsets[chunk], err);
}

static int made_up(const struct pen_tensor *tensor, const char *why, struct pen_error *err)
{
	char shown[WORDS_NAME];

	error_set(err, -EINVAL, "place tensor", words_name(shown, tensor->name), -1, "%s", why);
	error_hint(err, "Take tensors from this model's pen_model_tensors()");
	return -EINVAL;
}

/* The tensor's number in its file; the caller may have made the tensor up. */
static int find(const struct coded_load *load, const struct pen_tensor *tensor, size_t *number,
		struct pen_error *err)
{
	const struct coded *coded = load->model->coded[tensor->file];

	for (size_t low = 0, high = coded ? coded->table->count : 0; low < high;) {
		size_t middle = low + (high - low) / 2;
		const struct pen_tensor *there = &coded->table->tensors[middle];

		if (there->offset == tensor->offset && there->coded == tensor->coded &&
		    there->bytes == tensor->bytes && there->dtype == tensor->dtype) {
			*number = middle;
			return 0;
		}
		if (there->offset > tensor->offset)
			high = middle;
		else
			low = middle + 1;
	}
	return made_up(tensor, "it is said to be coded, and is not in its file", err);
}

int coded_load_want(struct coded_load *load, const struct pen_tensor *tensor,
		    struct pen_error *err)
{
	unsigned char **wanted = &load->wanted[tensor->file];
	size_t number;
	int rc = find(load, tensor, &number, err);

	if (rc)
		return rc;
	if (!*wanted)
		*wanted = os_calloc(load->model->coded[tensor->file]->table->count, 1);
	if (!*wanted)
		return error_sys(err, -ENOMEM, "load", load->model->files[tensor->file].name, -1);
	(*wanted)[number] = 1;
	return 0;
}

/* Chunks of neighbours are neighbours; tensors between them that are not coded have none. */
static int read_file(struct coded_load *load, size_t file, struct pen_error *err)
{
	const struct coded *coded = load->model->coded[file];
	const unsigned char *wanted = load->wanted[file];
	size_t count = wanted ? coded->table->count : 0, end;
	int rc = 0;

	for (size_t i = 0; i < count && !rc; i = end) {
		for (end = i + 1; end < count && wanted[i]; end++)
			if (!wanted[end] && coded->tensors[end].kind != PLANES_NONE)
				break;
		if (wanted[i])
			rc = coded_chunks_read(coded, load->model->files[file].object, i, end - i,
					       &load->chunks[file], err);
	}
	return rc;
}

int coded_load_read(struct coded_load *load, struct pen_error *err)
{
	int rc = 0;

	for (size_t i = 0; i < load->model->file_count && !rc; i++)
		rc = read_file(load, i, err);
	return rc;
}

int coded_load_add(struct coded_load *load, const struct pen_tensor *tensor,
		   const struct form *form, size_t number, struct pen_extent *extent,
		   struct pen_error *err)
{
	struct item *item = &load->items[number];
	struct coding *coding = &item->coding;
	const struct coded_tensor *known;
	uint64_t size, end, first;
	size_t which;
	int rc = find(load, tensor, &which, err);

	if (rc)
		return rc;
	known = &load->model->coded[tensor->file]->tensors[which];
	item->file = extent->object->name;
	item->tensor = &load->model->coded[tensor->file]->table->tensors[which];
	size = planes_shapes[known->kind].bytes;
	*coding = (struct coding){
		.kind = known->kind,
		.form = form,
		.chunks = load->chunks[tensor->file].chunks + known->first,
		.offsets = load->chunks[tensor->file].offsets + known->first,
		.values = known->values,
		.start = extent->offset / size,
		.length = extent->length / size,
		.rows = extent->rows > 1 ? extent->rows : 1,
		.memory_pitch = extent->memory_pitch,
		.damaged = damaged,
		.context = item,
	};
	coding->pitch = coding->rows > 1 ? extent->object_pitch / size : coding->length;
	first = coding->start / PLANES_CHUNK;
	end = coding->start + (coding->rows - 1) * coding->pitch + coding->length;
	if (end > known->values)
		return made_up(tensor, "its box ends behind the values that its file has", err);
	load->codings[number] = coding;
	extent->offset = coding->offsets[first];
	extent->length = coding_chunk_end(coding, (end - 1) / PLANES_CHUNK) - extent->offset;
	extent->rows = extent->object_pitch = extent->memory_pitch = extent->form = 0;
	return 0;
}
