/* SPDX-License-Identifier: MIT */
/*
 * Opening a model: find out which files it has (from names, an index or a folder), open each and
 * read its table, then make one list of all tensors. Files may be many thousands and tensors many
 * more, so nothing is searched in a loop: lists are sorted once and walked side by side.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "format/coded.h"
#include "format/index.h"
#include "format/model.h"
#include "format/words.h"
#include "io/object.h"
#include "sys/os.h"

#define SUFFIX ".safetensors"
#define INDEX_SUFFIX ".safetensors.index.json"
#define INDEX_NAME "model" INDEX_SUFFIX

static int no_memory(const char *path, struct pen_error *err)
{
	return error_sys(err, -ENOMEM, "open the model", path, -1);
}

static int fail(const char *path, int rc, const char *operation, struct pen_error *err)
{
	error_sys(err, rc, operation, path, -1);
	if (rc == -ENOENT)
		error_hint(err, "Check the path");
	else if (rc == -EACCES)
		error_hint(err, "Check the permissions of the file and its directory");
	else if (rc == -EMFILE)
		error_hint(err, "Raise the limit of open files, which is %llu (ulimit -n)",
			   (unsigned long long)os_files_limit());
	else if (rc == -ENFILE)
		error_hint(err, "The whole system has too many files open (fs.file-max)");
	return rc;
}

/* "folder/name"; the folder may be empty. NULL: no memory. */
static char *join(const char *folder, size_t folder_length, const char *name)
{
	size_t room = folder_length + strlen(name) + 2;
	char *path = os_calloc(1, room);

	if (path)
		snprintf(path, room, "%.*s%s%s", (int)folder_length, folder,
			 folder_length && folder[folder_length - 1] != '/' ? "/" : "", name);
	return path;
}

/* ------------------------------------------------------------------------- reading a file -- */

int model_read_header(struct pen_object *object, uint64_t size, struct safetensors **table,
		      struct coded **coded, struct pen_error *err)
{
	unsigned char first[8] = { 0 };
	size_t length;
	void *header;
	int rc;

	*table = NULL;
	*coded = NULL;
	rc = object_read(object, first, size < sizeof(first) ? (size_t)size : sizeof(first), 0,
			 err);
	if (!rc)
		rc = safetensors_header_length(object->name, first, size, &length, err);
	if (rc)
		return rc;
	header = os_calloc(1, length + 1);
	if (!header)
		return no_memory(object->name, err);
	rc = object_read(object, header, length, sizeof(first), err);
	if (!rc)
		rc = safetensors_parse(object->name, header, length, size, table, err);
	free(header);
	if (!rc)
		rc = coded_read(object->name, *table, coded, err);
	if (!rc && *coded)
		*table = (*coded)->table;
	return rc;
}

static int open_file(struct pen_model *model, const char *name, char *path, struct pen_error *err)
{
	struct pen_model_file *file = &model->files[model->file_count];
	struct safetensors **table = &model->tables[model->file_count];
	struct coded **coded = &model->coded[model->file_count++];
	char *copy = join("", 0, name);
	int rc;

	file->path = path;
	file->name = copy;
	if (!path || !copy)
		return no_memory(name, err);
	rc = object_open(model->start, path, PEN_READ, 0, &file->object, err);
	if (rc)
		return rc;
	/* A shard that is replaced while others are read would make a model that never was. */
	file->object->keeps_name = true;
	if (file->object->ops->transport == TRANSPORT_SYNTH) {
		error_set(err, -EINVAL, "open the model", path, -1, "it is a synthetic object");
		error_hint(err, "If it is a file, put ./ before its name");
		return -EINVAL;
	}
	file->size = pen_object_size(file->object);
	rc = model_read_header(file->object, file->size, table, coded, err);
	if (rc)
		return rc;
	file->data = (*table)->data;
	file->original = *coded ? (*coded)->bytes : 0;
	file->metadata = (*table)->metadata;
	file->metadata_count = (*table)->metadata_count;
	return 0;
}

static int make_files(struct pen_model *model, size_t count, const char *path,
		      struct pen_error *err)
{
	model->files = os_calloc(count + 1, sizeof(model->files[0]));
	model->tables = os_calloc(count + 1, sizeof(model->tables[0]));
	model->coded = os_calloc(count + 1, sizeof(model->coded[0]));
	return model->files && model->tables && model->coded ? 0 : no_memory(path, err);
}

/* ------------------------------------------------------------------------ all the tensors -- */

/* What is odd about one file, to warn of. */
struct odd {
	size_t unlisted, hidden;
	const struct pen_tensor *first_unlisted, *first_hidden;
	uint32_t hidden_by;	/* the file from which the first hidden one is taken */
};

struct merger {
	struct pen_model *model;
	const char *path;		/* of the index, or of the model */
	const struct index *index;	/* NULL: none */
	struct odd *odd;		/* one for each file */
	bool *gone;			/* one for each tensor: hidden by that of another file */
	size_t gone_count;
	struct pen_error *err;
};

static int name_order(const struct pen_tensor *tensor, const char *name, size_t length)
{
	return text_order(tensor->name, tensor->name_length, name, length);
}

static int by_name_and_file(const void *left, const void *right)
{
	const struct pen_tensor *a = *(const struct pen_tensor *const *)left;
	const struct pen_tensor *b = *(const struct pen_tensor *const *)right;
	int order = name_order(a, b->name, b->name_length);

	return order ? order : a->file < b->file ? -1 : a->file > b->file;
}

static void sort_by_name(struct pen_model *model)
{
	for (size_t i = 0; i < model->tensor_count; i++)
		model->by_name[i] = &model->tensors[i];
	qsort(model->by_name, model->tensor_count, sizeof(model->by_name[0]), by_name_and_file);
}

static int twice(const struct merger *merger, const struct pen_tensor *one,
		 const struct pen_tensor *other)
{
	const struct pen_model_file *files = merger->model->files;
	char name[WORDS_NAME], file[WORDS_NAME];

	words_bad(merger->err, files[other->file].path, (int64_t)other->offset,
		  "tensor \"%s\" is also in %s", words_text(name, one->name, one->name_length),
		  words_name(file, files[one->file].name));
	error_hint(merger->err, "Leave one of the files out, or add an index that says which one "
		   "is meant");
	return -EBADMSG;
}

/* The index lists a tensor for a file that does not have it; another one may. */
static int absent(const struct merger *merger, const struct index_entry *entry,
		  const struct pen_tensor *other)
{
	char name[WORDS_NAME], file[WORDS_NAME];

	words_bad(merger->err, merger->path, -1,
		  "tensor \"%s\" is listed for %s, which does not have it",
		  words_text(name, entry->tensor, entry->length),
		  words_name(file, merger->index->files[entry->file]));
	if (other)
		error_hint(merger->err, "%s has it: the index belongs to other files; download all "
			   "again", words_name(file, merger->model->files[other->file].name));
	error_hint(merger->err, "The index belongs to other files: download them again");
	return -EBADMSG;
}

/* Tensors of one name, sorted by file, that no entry of an index speaks of. */
static int settle_unlisted(struct merger *merger, const struct pen_tensor **same, size_t count)
{
	struct odd *odd = &merger->odd[same[0]->file];

	if (count > 1)
		return twice(merger, same[0], same[1]);
	if (merger->index && !odd->unlisted++)
		odd->first_unlisted = same[0];
	return 0;
}

/* Tensors of one name, of which the index lists one: that is taken, the others are hidden. */
static int settle_listed(struct merger *merger, const struct pen_tensor **same, size_t count,
			 const struct index_entry *entry)
{
	bool found = false;

	for (size_t i = 0; i < count; i++) {
		struct odd *odd = &merger->odd[same[i]->file];

		if (same[i]->file == entry->file) {
			found = true;
			continue;
		}
		if (!odd->hidden++) {
			odd->first_hidden = same[i];
			odd->hidden_by = entry->file;
		}
		merger->gone[same[i] - merger->model->tensors] = true;
		merger->gone_count++;
	}
	return found ? 0 : absent(merger, entry, same[0]);
}

/* Walk tensors and entries of the index side by side, both sorted by name. */
static int settle(struct merger *merger)
{
	const struct pen_tensor **by_name = merger->model->by_name;
	size_t count = merger->model->tensor_count, at = 0, next;
	const struct index *index = merger->index;
	const struct index_entry *entry = index ? index->entries : NULL;
	const struct index_entry *end = index ? index->entries + index->count : NULL;
	int rc = 0;

	for (; at < count && !rc; at = next) {
		int order = entry < end ? -name_order(by_name[at], entry->tensor, entry->length)
					: 1;

		if (order < 0)
			return absent(merger, entry, NULL);
		for (next = at + 1; next < count; next++)
			if (name_order(by_name[next], by_name[at]->name, by_name[at]->name_length))
				break;
		if (order)
			rc = settle_unlisted(merger, by_name + at, next - at);
		else
			rc = settle_listed(merger, by_name + at, next - at, entry++);
	}
	return rc ? rc : entry < end ? absent(merger, entry, NULL) : 0;
}

static int warn(struct merger *merger, size_t count, const struct pen_tensor *first,
		const char *format, const char *file, const char *other)
{
	char text[4 * WORDS_NAME], who[WORDS_NAME + 40], name[WORDS_NAME];
	char **warning = &merger->model->warnings[merger->model->warning_count];

	words_text(name, first->name, first->name_length);
	if (count == 1)
		snprintf(who, sizeof(who), "tensor \"%s\" is", name);
	else
		snprintf(who, sizeof(who), "%zu tensors (\"%s\" ...) are", count, name);
	snprintf(text, sizeof(text), format, who, file, other);
	*warning = join("", 0, text);
	if (!*warning)
		return no_memory(merger->path, merger->err);
	merger->model->warning_count++;
	return 0;
}

static int warn_of_files(struct merger *merger)
{
	struct pen_model *model = merger->model;
	char file[WORDS_NAME], other[WORDS_NAME];
	int rc = 0;

	/* Two for each file, and one for those that do not belong to it. */
	model->warnings = os_calloc(2 * model->file_count + 1, sizeof(model->warnings[0]));
	if (!model->warnings)
		return no_memory(merger->path, merger->err);
	for (size_t i = 0; i < model->file_count && !rc; i++) {
		const struct odd *odd = &merger->odd[i];

		words_name(file, model->files[i].name);
		words_name(other, model->files[odd->hidden_by].name);
		if (odd->unlisted)
			rc = warn(merger, odd->unlisted, odd->first_unlisted,
				  "%s in %s but not listed in the index", file, "");
		if (odd->hidden && !rc)
			rc = warn(merger, odd->hidden, odd->first_hidden,
				  "%s in %s too, but taken from %s as the index says", file, other);
	}
	return rc;
}

/* A coded file has moved its tensors; nobody shall notice that who lists them. */
static void add_table(struct pen_model *model, uint32_t file)
{
	const struct safetensors *table = model->tables[file];
	const struct coded *coded = model->coded[file];
	struct pen_tensor *tensors = model->tensors + model->tensor_count;

	for (size_t i = 0; i < table->count; i++) {
		tensors[i] = table->tensors[coded ? coded->order[i] : i];
		tensors[i].file = file;
		model->by_name[model->tensor_count + i] =
			tensors + (table->by_name[i] - table->tensors);
	}
	model->tensor_count += table->count;
}

/* All tables in one list, whatever is in them. */
static int gather(struct pen_model *model, const char *path, struct pen_error *err)
{
	size_t count = 0;

	for (size_t i = 0; i < model->file_count; i++)
		count += model->tables[i]->count;
	model->tensors = os_calloc(count + 1, sizeof(model->tensors[0]));
	model->by_name = os_calloc(count + 1, sizeof(model->by_name[0]));
	if (!model->tensors || !model->by_name)
		return no_memory(path, err);
	for (size_t i = 0; i < model->file_count; i++)
		add_table(model, (uint32_t)i);
	/* The names of one table are sorted already, unless its tensors were moved. */
	if (model->file_count > 1 || (model->file_count && model->coded[0]))
		sort_by_name(model);
	return 0;
}

static void drop_hidden(struct merger *merger)
{
	struct pen_model *model = merger->model;
	size_t kept = 0;

	if (!merger->gone_count)
		return;
	for (size_t i = 0; i < model->tensor_count; i++)
		if (!merger->gone[i])
			model->tensors[kept++] = model->tensors[i];
	model->tensor_count = kept;
	sort_by_name(model);
}

static int merge(struct pen_model *model, const char *path, const struct index *index,
		 struct pen_error *err)
{
	struct merger merger = { .model = model, .path = path, .index = index, .err = err };
	int rc = gather(model, path, err);

	if (rc)
		return rc;
	merger.odd = os_calloc(model->file_count + 1, sizeof(merger.odd[0]));
	merger.gone = os_calloc(model->tensor_count + 1, sizeof(merger.gone[0]));
	rc = merger.odd && merger.gone ? settle(&merger) : no_memory(path, err);
	if (!rc)
		rc = warn_of_files(&merger);
	if (!rc)
		drop_hidden(&merger);
	free(merger.odd);
	free(merger.gone);
	return rc;
}

/* ---------------------------------------------------------------------------- which files -- */

static int open_single(struct pen_model *model, const char *path, struct pen_error *err)
{
	const char *slash = strrchr(path, '/');
	int rc = make_files(model, 1, path, err);

	if (!rc)
		rc = open_file(model, slash ? slash + 1 : path, join("", 0, path), err);
	return rc ? rc : merge(model, path, NULL, err);
}

static int no_index(const char *path, struct pen_error *err)
{
	words_bad(err, path, -1, "it is not a file of at most %u bytes, as an index is",
		  INDEX_SIZE_MAX);
	error_hint(err, "Name a folder, a .safetensors file or an index");
	return -EBADMSG;
}

static int read_index_from(struct pen_object *object, struct index **index, struct pen_error *err)
{
	uint64_t size = pen_object_size(object);
	char *bytes;
	int rc;

	if (size > INDEX_SIZE_MAX)
		return no_index(object->name, err);
	bytes = os_calloc(1, (size_t)size + 1);
	if (!bytes)
		return no_memory(object->name, err);
	rc = object_read(object, bytes, (size_t)size, 0, err);
	if (!rc)
		rc = index_parse(object->name, bytes, (size_t)size, index, err);
	free(bytes);
	return rc;
}

static int read_index(int start, const char *path, struct index **index, struct pen_error *err)
{
	struct pen_object *object;
	int rc = object_open(start, path, PEN_READ, 0, &object, err);

	/* A pipe, a device, a folder. */
	if (rc == -ESPIPE || rc == -EISDIR)
		return no_index(path, err);
	if (rc)
		return rc;
	rc = read_index_from(object, index, err);
	pen_object_close(object);
	return rc;
}

/* A shard that the index names and that is not there gets words of its own. */
static void missing(const struct pen_model *model, const struct index *index, const char *path,
		    struct pen_error *err)
{
	const struct pen_model_file *file = &model->files[model->file_count - 1];
	char name[WORDS_NAME];

	error_set(err, -ENOENT, "open", file->path, -1,
		  "%s names it, and it is not there (file %zu of %zu)", words_name(name, path),
		  model->file_count, index->file_count);
	error_hint(err, "The download may be incomplete: fetch the missing file");
}

static int open_indexed(struct pen_model *model, const char *path, struct pen_error *err)
{
	const char *slash = strrchr(path, '/');
	size_t folder = slash ? (size_t)(slash - path) + 1 : 0;
	struct index *index = NULL;
	int rc = read_index(model->start, path, &index, err);

	if (!rc)
		rc = make_files(model, index->file_count, path, err);
	for (size_t i = 0; !rc && i < index->file_count; i++) {
		rc = open_file(model, index->files[i], join(path, folder, index->files[i]), err);
		if (rc == -ENOENT)
			missing(model, index, path, err);
	}
	if (!rc)
		rc = merge(model, path, index, err);
	free(index);
	return rc;
}

/* What a folder holds, as far as we care. */
struct listing {
	char **names;			/* of safetensors files */
	size_t count, room;
	char *index, *other_index;	/* the index to use; one more that might be meant */
	bool torch, cache;		/* files of torch's; a folder of the Hugging Face cache */
};

static int add_name(struct listing *listing, const char *name)
{
	if (listing->count == listing->room) {
		size_t room = listing->room ? 2 * listing->room : 64;
		char **names = os_calloc(room, sizeof(names[0]));

		if (!names)
			return -ENOMEM;
		if (listing->count)
			memcpy(names, listing->names, listing->count * sizeof(names[0]));
		free(listing->names);
		listing->names = names;
		listing->room = room;
	}
	listing->names[listing->count] = join("", 0, name);
	if (!listing->names[listing->count])
		return -ENOMEM;
	listing->count++;
	return 0;
}

static int add_index(struct listing *listing, const char *name)
{
	char *copy = join("", 0, name), *second = copy;

	if (!copy)
		return -ENOMEM;
	/* The usual name beats all others. */
	if (!listing->index || !strcmp(name, INDEX_NAME)) {
		second = listing->index;
		listing->index = copy;
	}
	if (second) {
		free(listing->other_index);
		listing->other_index = second;
	}
	return 0;
}

static int look_at(const char *name, void *context)
{
	struct listing *listing = context;

	if (name[0] == '.')
		return 0;
	if (text_ends_with(name, SUFFIX))
		return add_name(listing, name);
	if (text_ends_with(name, INDEX_SUFFIX))
		return add_index(listing, name);
	listing->torch |= text_ends_with(name, ".bin") || text_ends_with(name, ".pt") ||
			  text_ends_with(name, ".pth");
	listing->cache |= !strcmp(name, "snapshots");
	return 0;
}

static int nothing_there(const struct listing *listing, const char *path, struct pen_error *err)
{
	error_set(err, -ENOENT, "open the model", path, -1,
		  "the folder has no *" SUFFIX " file and no *" INDEX_SUFFIX);
	if (listing->torch)
		error_hint(err, "Its .bin or .pt files are in torch's own format, which cannot be "
			   "loaded yet: convert them to safetensors");
	if (listing->cache)
		error_hint(err, "Name one of the folders in %s/snapshots", path);
	error_hint(err, "Name the folder where the model's files are");
	return -ENOENT;
}

static int by_text(const void *left, const void *right)
{
	return strcmp(*(char *const *)left, *(char *const *)right);
}

static int by_file_name(const void *name, const void *file)
{
	return strcmp(name, ((const struct pen_model_file *)file)->name);
}

/* Files that lie beside those of the index: another layout of the model, or remains. */
static int warn_of_others(struct pen_model *model, const char *path, const struct listing *listing,
			  struct pen_error *err)
{
	char text[2 * WORDS_NAME], name[WORDS_NAME];
	const char *first = NULL;
	size_t count = 0;

	for (size_t i = 0; i < listing->count; i++) {
		/* Sorted, as the index has them. */
		if (bsearch(listing->names[i], model->files, model->file_count,
			    sizeof(model->files[0]), by_file_name))
			continue;
		if (!count++ || strcmp(listing->names[i], first) < 0)
			first = listing->names[i];
	}
	if (!count)
		return 0;
	words_name(name, first);
	if (count == 1)
		snprintf(text, sizeof(text), "%s is in the folder but not named by the index, and "
			 "is left out", name);
	else
		snprintf(text, sizeof(text), "%zu files (%s ...) are in the folder but not named "
			 "by the index, and are left out", count, name);
	model->warnings[model->warning_count] = join("", 0, text);
	if (!model->warnings[model->warning_count])
		return no_memory(path, err);
	model->warning_count++;
	return 0;
}

static int open_listed(struct pen_model *model, const char *path, struct listing *listing,
		       struct pen_error *err)
{
	int rc;

	if (listing->index && listing->other_index && strcmp(listing->index, INDEX_NAME)) {
		error_set(err, -EINVAL, "open the model", path, -1,
			  "it has several indices: %.60s, %.60s", listing->index,
			  listing->other_index);
		error_hint(err, "Name the index that is meant");
		return -EINVAL;
	}
	if (listing->index) {
		char *index = join(path, strlen(path), listing->index);

		rc = index ? open_indexed(model, index, err) : no_memory(path, err);
		free(index);
		return rc ? rc : warn_of_others(model, path, listing, err);
	}
	if (!listing->count)
		return nothing_there(listing, path, err);
	qsort(listing->names, listing->count, sizeof(listing->names[0]), by_text);
	rc = make_files(model, listing->count, path, err);
	for (size_t i = 0; !rc && i < listing->count; i++)
		rc = open_file(model, listing->names[i],
			       join(path, strlen(path), listing->names[i]), err);
	return rc ? rc : merge(model, path, NULL, err);
}

static int open_folder(struct pen_model *model, const char *path, struct pen_error *err)
{
	struct listing listing = { 0 };
	int rc = os_list(model->start, path, look_at, &listing);

	if (rc)
		fail(path, rc, "list", err);
	else
		rc = open_listed(model, path, &listing, err);
	for (size_t i = 0; i < listing.count; i++)
		free(listing.names[i]);
	free(listing.names);
	free(listing.index);
	free(listing.other_index);
	return rc;
}

/* --------------------------------------------------------------------------------- public -- */

static int no_name(int code, const char *message, struct pen_error *err)
{
	error_set(err, code, "open the model", "\"\"", -1, "%s", message);
	error_hint(err, "Name a file or a folder");
	return code;
}

/* A model without files. All that it will have belong together, wherever the process may go in the
 * meantime. */
static int start_model(const char *const *paths, size_t count, struct pen_model **model,
		       struct pen_error *err)
{
	bool relative = false;
	int rc;

	error_clear(err);
	*model = NULL;
	if (!count)
		return no_name(-EINVAL, "no file is named", err);
	for (size_t i = 0; i < count; i++) {
		if (!paths[i][0])
			return no_name(-ENOENT, "the name is empty", err);
		relative |= paths[i][0] != '/';
	}
	*model = os_calloc(1, sizeof(**model));
	if (!*model)
		return no_memory(paths[0], err);
	(*model)->start = AT_FDCWD;
	if (!relative)
		return 0;
	rc = os_open(AT_FDCWD, ".", O_PATH | O_DIRECTORY, 0);
	if (rc < 0)
		return fail(paths[0], rc, "open", err);
	(*model)->start = rc;
	return 0;
}

/* What is half open is closed after an error. */
static int finish_model(struct pen_model **model, int rc)
{
	if (rc) {
		pen_model_close(*model);
		*model = NULL;
	}
	return rc;
}

static int open_any(struct pen_model *model, const char *path, struct pen_error *err)
{
	struct stat st;
	int rc = os_stat(model->start, path, &st);

	if (rc)
		return fail(path, rc, "open", err);
	if (S_ISDIR(st.st_mode))
		return open_folder(model, path, err);
	if (text_ends_with(path, ".json"))
		return open_indexed(model, path, err);
	return open_single(model, path, err);
}

int pen_model_open(const char *path, struct pen_model **model, struct pen_error *err)
{
	int rc = start_model(&path, 1, model, err);

	return finish_model(model, rc ? rc : open_any(*model, path, err));
}

int pen_model_open_files(const char *const *paths, size_t count, struct pen_model **model,
			 struct pen_error *err)
{
	int rc = start_model(paths, count, model, err);

	if (!rc)
		rc = make_files(*model, count, paths[0], err);
	for (size_t i = 0; !rc && i < count; i++)
		rc = open_file(*model, paths[i], join("", 0, paths[i]), err);
	return finish_model(model, rc ? rc : merge(*model, paths[0], NULL, err));
}

void pen_model_close(struct pen_model *model)
{
	if (!model)
		return;
	for (size_t i = 0; i < model->file_count; i++) {
		pen_object_close(model->files[i].object);
		free((char *)model->files[i].path);
		free((char *)model->files[i].name);
		if (model->coded[i])
			coded_free(model->coded[i]);
		else
			free(model->tables[i]);
	}
	for (size_t i = 0; i < model->warning_count; i++)
		free(model->warnings[i]);
	if (model->start >= 0)
		os_close(model->start);
	free(model->files);
	free(model->tables);
	free(model->coded);
	free(model->tensors);
	free(model->by_name);
	free(model->warnings);
	free(model);
}

size_t pen_model_tensors(const struct pen_model *model, const struct pen_tensor **tensors)
{
	if (tensors)
		*tensors = model->tensors;
	return model->tensor_count;
}

size_t pen_model_files(const struct pen_model *model, const struct pen_model_file **files)
{
	if (files)
		*files = model->files;
	return model->file_count;
}

size_t pen_model_warnings(const struct pen_model *model, const char *const **warnings)
{
	if (warnings)
		*warnings = (const char *const *)model->warnings;
	return model->warning_count;
}

static int name_against(const void *name, const void *entry)
{
	const struct pen_tensor *wanted = name;

	return -name_order(*(const struct pen_tensor *const *)entry, wanted->name,
			   wanted->name_length);
}

const struct pen_tensor *pen_model_find_name(const struct pen_model *model, const char *name,
					     size_t length)
{
	struct pen_tensor wanted = { .name = name, .name_length = length };
	const struct pen_tensor **found = bsearch(&wanted, model->by_name, model->tensor_count,
						  sizeof(model->by_name[0]), name_against);

	return found ? *found : NULL;
}

const struct pen_tensor *pen_model_find(const struct pen_model *model, const char *name)
{
	return pen_model_find_name(model, name, strlen(name));
}
