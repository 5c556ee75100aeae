/* SPDX-License-Identifier: MIT */
/* null: and pattern:SIZE, each with ,latency=TIME ,rate=BYTES ,knee=BYTES ,least=BYTES ,best=BYTES
 * ,most=BYTES ,whole=1 ,retry=TIME; see synth.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/pattern.h"
#include "base/text.h"
#include "io/synth.h"
#include "sys/os.h"

/* A size of requests. */
static int parse_request(const char *value, uint32_t *bytes)
{
	uint64_t size;

	if (text_to_size(value, &size) || size < 4096 || size > (1u << 30) || (size & (size - 1)))
		return -EINVAL;
	*bytes = (uint32_t)size;
	return 0;
}

static int parse_term(struct synth *synth, struct object_info *info, const char *term,
		      const char *value)
{
	if (!strcmp(term, "least"))
		return parse_request(value, &info->request_least);
	if (!strcmp(term, "best"))
		return parse_request(value, &info->request_best);
	if (!strcmp(term, "most"))
		return parse_request(value, &info->request_most);
	if (!strcmp(term, "whole")) {
		info->resend_whole = !strcmp(value, "1");
		return info->resend_whole || !strcmp(value, "0") ? 0 : -EINVAL;
	}
	if (!strcmp(term, "retry"))
		return text_to_nanoseconds(value, &info->retry_ns);
	if (!strcmp(term, "latency"))
		return text_to_nanoseconds(value, &synth->latency_ns);
	if (!strcmp(term, "rate"))
		return text_to_size(value, &synth->rate);
	if (!strcmp(term, "knee"))
		return text_to_size(value, &synth->knee);
	return -EINVAL;
}

static int parse(struct pen_object *object, struct synth *synth)
{
	char text[256], *rest, *word, *value;
	uint64_t size = UINT64_MAX;
	bool first = true;

	if (strlen(object->name) >= sizeof(text))
		return -EINVAL;
	strcpy(text, object->name);
	rest = strchr(text, ':') + 1;
	while ((word = strsep(&rest, ",")) != NULL) {
		value = strchr(word, '=');
		if (first && synth->pattern) {
			if (text_to_size(word, &size) || size > INT64_MAX)
				return -EINVAL;
		} else if (value) {
			*value = 0;
			if (parse_term(synth, &object->info, word, value + 1))
				return -EINVAL;
		} else if (!first || word[0]) {
			return -EINVAL;
		}
		first = false;
	}
	if (synth->pattern || object->mode == PEN_READ)
		object->info.size = size;
	return 0;
}

static int synth_open(struct pen_object *object, struct pen_error *err)
{
	struct synth *synth = os_calloc(1, sizeof(*synth));

	if (!synth)
		return error_sys(err, -ENOMEM, "open", object->name, -1);
	synth->pattern = object->name[0] == 'p';
	if (parse(object, synth)) {
		free(synth);
		error_set(err, -EINVAL, "open", object->name, -1, "it cannot be understood");
		error_hint(err, "Write null: or pattern:SIZE, then any of ,latency=TIME ,rate=SIZE "
				",knee=SIZE ,least=SIZE ,best=SIZE ,most=SIZE ,whole=1 "
				",retry=TIME, as in pattern:1G,latency=5ms,rate=2G");
		return -EINVAL;
	}
	object->state = synth;
	text_copy(object->info.filesystem, sizeof(object->info.filesystem), "synthetic");
	text_copy_end(object->info.store, sizeof(object->info.store), object->name);
	text_copy(object->info.no_direct, sizeof(object->info.no_direct),
		  "it is made up in memory");
	return 0;
}

static int synth_read(struct pen_object *object, void *buffer, size_t length, uint64_t offset,
		      struct pen_error *err)
{
	if (length > object->info.size || offset > object->info.size - length)
		return error_set(err, -ESTALE, "read", object->name, (int64_t)offset,
				 "it ends at byte %llu", (unsigned long long)object->info.size);
	if (synth_of(object)->pattern)
		pattern_fill(buffer, length, offset);
	else
		memset(buffer, 0, length);
	return 0;
}

static int synth_residency(struct pen_object *object, uint64_t offset, uint64_t length,
			   uint64_t *resident, struct pen_error *err)
{
	(void)object;
	(void)offset;
	(void)length;
	(void)err;
	*resident = 0;
	return 0;
}

static void synth_willneed(struct pen_object *object, uint64_t offset, uint64_t length)
{
	(void)object;
	(void)offset;
	(void)length;
}

/* It never changes, is never cached and needs no commit. */
static int synth_nothing(struct pen_object *object, struct pen_error *err)
{
	(void)object;
	(void)err;
	return 0;
}

static void synth_close(struct pen_object *object)
{
	free(object->state);
}

const struct object_ops object_synth_ops = {
	.kind = "synthetic",
	.transport = TRANSPORT_SYNTH,
	.open = synth_open,
	.read = synth_read,
	.residency = synth_residency,
	.willneed = synth_willneed,
	.unchanged = synth_nothing,
	.uncache = synth_nothing,
	.need_name = synth_nothing,
	.flush = synth_nothing,
	.commit = synth_nothing,
	.close = synth_close,
};
