/* SPDX-License-Identifier: MIT */
/* Opening objects by name, and the one wrapper around their table; see object.h. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "io/object.h"
#include "sys/os.h"

/* What a request that failed in a way that may pass is given, where the store has no other wish. */
#define RETRIES 5u
#define RETRY_NS 100000u

static bool is_synthetic(const char *name)
{
	return !strncmp(name, "null:", 5) || !strncmp(name, "pattern:", 8);
}

int pen_object_open(const char *name, enum pen_mode mode, uint64_t size,
		    struct pen_object **object, struct pen_error *err)
{
	return object_open(AT_FDCWD, name, mode, size, object, err);
}

int object_open(int start, const char *name, enum pen_mode mode, uint64_t size,
		struct pen_object **object, struct pen_error *err)
{
	static _Atomic uint64_t ids;
	struct pen_object *new;
	int rc;

	error_clear(err);
	*object = NULL;
	if (mode < PEN_READ || mode > PEN_WRITE_IN_PLACE)
		return error_set(err, -EINVAL, "open", name, -1, "%d is no mode", (int)mode);
	if (!name[0])	/* as open(2) has it */
		return error_set(err, -ENOENT, "open", "\"\"", -1, "the name is empty");
	new = os_calloc(1, sizeof(*new));
	if (!new)
		return error_sys(err, -ENOMEM, "open", name, -1);
	new->name = os_calloc(1, strlen(name) + 1);
	if (!new->name) {
		free(new);
		return error_sys(err, -ENOMEM, "open", name, -1);
	}
	strcpy(new->name, name);
	new->ops = is_synthetic(name) ? &object_synth_ops : &object_file_ops;
	new->start = start;
	new->id = atomic_fetch_add(&ids, 1) + 1;
	new->mode = mode;
	new->fd = new->direct_fd = -1;
	new->info.size = size;
	new->info.retries = RETRIES;
	new->info.retry_ns = RETRY_NS;
	rc = new->ops->open(new, err);
	if (rc) {
		free(new->name);
		free(new);
		return rc;
	}
	assert(new->fd >= 0 || new->ops->transport != TRANSPORT_FILE);
	assert(!new->info.offset_align || new->direct_fd >= 0);
	*object = new;
	return 0;
}

uint64_t pen_object_size(const struct pen_object *object)
{
	return object->info.size;
}

int pen_object_commit(struct pen_object *object, struct pen_error *err)
{
	int rc;

	error_clear(err);
	if (object->mode == PEN_READ)
		return error_set(err, -EBADF, "commit", object->name, -1,
				 "it was opened for reading");
	if (object->committed)
		return error_set(err, -EALREADY, "commit", object->name, -1,
				 "it is committed already");
	rc = object->ops->commit(object, err);
	assert(rc <= 0);
	object->committed = !rc;
	return rc;
}

void pen_object_close(struct pen_object *object)
{
	if (!object)
		return;
	object->ops->close(object);
	free(object->name);
	free(object);
}

int object_read(struct pen_object *object, void *buffer, size_t length, uint64_t offset,
		struct pen_error *err)
{
	int rc = length ? object->ops->read(object, buffer, length, offset, err) : 0;

	assert(rc <= 0);
	return rc;
}

int object_residency(struct pen_object *object, uint64_t offset, uint64_t length,
		     uint64_t *resident, struct pen_error *err)
{
	int rc;

	assert(length);
	*resident = 0;
	if (!object->info.has_residency)
		return 0;
	rc = object->ops->residency(object, offset, length, resident, err);
	assert(rc <= 0 && *resident <= length);
	return rc;
}

void object_fetch(struct pen_object *object, uint64_t offset, uint64_t length)
{
	object->ops->fetch(object, offset, length);
}

int object_unchanged(struct pen_object *object, struct pen_error *err)
{
	return object->ops->unchanged(object, err);
}

int object_need_name(struct pen_object *object, struct pen_error *err)
{
	return object->ops->need_name(object, err);
}

int object_flush(struct pen_object *object, struct pen_error *err)
{
	int rc;

	assert(!object->committed);
	rc = object->ops->flush(object, err);
	assert(rc <= 0);
	return rc;
}

int object_uncache(struct pen_object *object, struct pen_error *err)
{
	return object->ops->uncache(object, err);
}
