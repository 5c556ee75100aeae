/* SPDX-License-Identifier: MIT */
/* The options of a job: names of types and policies, defaults, and what makes no sense. */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/digest.h"
#include "base/error.h"
#include "base/text.h"
#include "engine/schedule.h"
#include "io/object.h"

static const char *const transfer_names[] = {
	"AUTO", "GPU_DIRECT", "CPU_ONLY", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU",
	"GPU_DIRECT_ASYNC", "GPU_BATCH", "GPU_BATCH_STREAM", "MAPPED",
};
#define TRANSFERS ((int)(sizeof(transfer_names) / sizeof(transfer_names[0])))

/* The way from storage to GPU spelled out, as PyTorch's proposal for torch.load has it. */
static const char *const transfer_ways[TRANSFERS] = {
	[PEN_GPU_DIRECT] = "Storage->GPU",
	[PEN_CPU_ONLY] = "Storage->CPU",
	[PEN_CPU_GPU] = "Storage->CPU->GPU",
	[PEN_CPU_ASYNC_GPU] = "Storage->CPU->GPU_ASYNC",
	[PEN_CPU_CACHED_GPU] = "Storage->PAGE_CACHE->CPU->GPU",
	[PEN_GPU_DIRECT_ASYNC] = "Storage->GPU_ASYNC",
	[PEN_GPU_BATCH] = "Storage->GPU_BATCH",
};

const char *pen_transfer_name(int type)
{
	return type >= 0 && type < TRANSFERS ? transfer_names[type] : NULL;
}

int pen_transfer_number(int type)
{
	return type >= PEN_GPU_DIRECT && type <= PEN_GPU_BATCH_STREAM ? type - PEN_GPU_DIRECT : -1;
}

int pen_transfer_parse(const char *text, int *type, struct pen_error *err)
{
	uint64_t number;

	error_clear(err);
	if (!text_to_number(text, PEN_GPU_BATCH_STREAM - PEN_GPU_DIRECT, &number)) {
		*type = (int)number + PEN_GPU_DIRECT;
		return 0;
	}
	for (int i = 0; i < TRANSFERS; i++)
		if (!strcasecmp(text, transfer_names[i]) ||
		    (transfer_ways[i] && !strcasecmp(text, transfer_ways[i]))) {
			*type = i;
			return 0;
		}
	error_set(err, -EINVAL, "use transfer type", text, -1, "there is no such type");
	error_hint(err,
		   "Types are auto, 0 GPU_DIRECT, 1 CPU_ONLY, 2 CPU_GPU, 3 CPU_ASYNC_GPU, "
		   "4 CPU_CACHED_GPU, 5 GPU_DIRECT_ASYNC, 6 GPU_BATCH, 7 GPU_BATCH_STREAM, MAPPED");
	return -EINVAL;
}

static const struct {
	const char *word;
	enum pen_cache cache;
} cache_words[] = {
	{ "auto", PEN_CACHE_AFTER_UNASKED }, { "keep", PEN_CACHE_KEEP },
	{ "after", PEN_CACHE_AFTER }, { "drop", PEN_CACHE_DROP }, { "off", PEN_CACHE_AUTO },
};

int pen_cache_parse(const char *text, int *cache, struct pen_error *err)
{
	const char *set = getenv("PENSTOCK_CACHE");
	const char *word = text ? text : set && set[0] ? set : "auto";

	error_clear(err);
	for (size_t i = 0; i < sizeof(cache_words) / sizeof(cache_words[0]); i++)
		if (!strcmp(word, cache_words[i].word)) {
			*cache = cache_words[i].cache;
			return 0;
		}
	error_set(err, -EINVAL, "use cache policy", word, -1, "there is no such policy%s",
		  text ? "" : "; the environment variable PENSTOCK_CACHE has it");
	error_hint(err, "Policies are auto, keep, after, drop and off");
	return -EINVAL;
}

#define CHUNK_MIN (64ull << 10)
#define CHUNK_MAX (16ull << 20)

/* One table for an object. */
static bool asked_twice(const struct pen_options *options, size_t index)
{
	for (size_t i = 0; i < index; i++)
		if (options->digests[i].object == options->digests[index].object)
			return true;
	return false;
}

static bool cuts_right(const struct pen_digests *digests)
{
	if (digests->cut_count && !digests->cuts)
		return false;
	for (size_t i = 0; i < digests->cut_count; i++)
		if (!(digests->cuts[i] % digests->chunk) ||
		    (i && digests->cuts[i] <= digests->cuts[i - 1]))
			return false;
	return true;
}

static int check_digests(const struct pen_options *options, struct pen_error *err)
{
	for (size_t i = 0; i < options->digest_count; i++) {
		const struct pen_digests *digests = &options->digests[i];
		const char *name = digests->object ? digests->object->name : "";
		bool reserved = digests->flags;

		for (size_t r = 0; r < sizeof(digests->reserved) / sizeof(uint64_t); r++)
			reserved |= digests->reserved[r] != 0;
		if (!digests->object || !digests->values || !digests->states || reserved)
			return error_set(err, -EINVAL, "digest", name, -1,
					 "an object or a table is missing, or a reserved field is "
					 "not zero");
		if (asked_twice(options, i))
			return error_set(err, -EINVAL, "digest", name, -1,
					 "digests of one object are asked for twice");
		if (!digest_kind(digests->kind))
			return error_set(err, -EINVAL, "digest", name, -1,
					 "%d is no kind of digest", digests->kind);
		if (digests->chunk < CHUNK_MIN || digests->chunk > CHUNK_MAX ||
		    (digests->chunk & (digests->chunk - 1))) {
			error_set(err, -EINVAL, "digest", name, -1, "chunks of %llu bytes",
				  (unsigned long long)digests->chunk);
			error_hint(err, "Take a power of two from 64 KiB to 16 MiB");
			return -EINVAL;
		}
		if (!cuts_right(digests))
			return error_set(err, -EINVAL, "digest", name, -1,
					 "its cuts do not ascend, or are at ends of chunks anyway");
	}
	return 0;
}

/* A digested chunk travels in one request, and two requests must find room. */
static int check_memory(const struct pen_options *options, struct pen_error *err)
{
	uint64_t least = MEMORY_LIMIT_MIN;

	for (size_t i = 0; i < options->digest_count; i++)
		if (2 * options->digests[i].chunk > least)
			least = 2 * options->digests[i].chunk;
	if (options->memory_limit >= least)
		return 0;
	error_set(err, -EINVAL, "keep within", "the memory limit", -1,
		  "%llu bytes are too few to stage a transfer%s",
		  (unsigned long long)options->memory_limit,
		  options->digest_count ? " with digests" : "");
	/* Who saves or loads a checkpoint has its options looked at before there are digests. */
	if (options->digest_count)
		error_hint(err, "Allow at least %llu KiB", (unsigned long long)least >> 10);
	else
		error_hint(err, "Allow at least %llu KiB, or %llu KiB where bytes are digested",
			   (unsigned long long)least >> 10, 2 * CHUNK_MIN >> 10);
	return -EINVAL;
}

int schedule_options(const struct pen_options *given, struct pen_options *full,
		     struct pen_error *err)
{
	static const struct pen_options defaults = PEN_OPTIONS_INIT;
	const char *object = "the options";

	*full = defaults;
	if (given) {
		/* A caller compiled against an older header has a shorter struct. */
		size_t size = given->size < sizeof(*full) ? given->size : sizeof(*full);

		if (size < offsetof(struct pen_options, memory_limit))
			return error_set(err, -EINVAL, "use", object, -1, "their size is not set");
		memcpy(full, given, size);
		full->size = sizeof(*full);
		/* One of a newer header may wish for what this library does not know. */
		for (size_t i = sizeof(*full); i < given->size; i++)
			if (((const unsigned char *)given)[i])
				return error_set(err, -EINVAL, "use", object, -1,
						 "this library is older than what they ask for");
	}
	if (!pen_transfer_name(full->transfer))
		return error_set(err, -EINVAL, "use", object, -1, "%d is no transfer type",
				 full->transfer);
	if (full->cache < PEN_CACHE_AUTO || full->cache > PEN_CACHE_AFTER_UNASKED)
		return error_set(err, -EINVAL, "use", object, -1, "%d is no cache policy",
				 full->cache);
	if (!full->memory_limit)
		full->memory_limit = MEMORY_LIMIT_DEFAULT;
	if ((full->digest_count && !full->digests) || (full->stream_count && !full->streams))
		return error_set(err, -EINVAL, "use", object, -1,
				 "they count digests or streams that are not there");
	if (check_digests(full, err) || check_memory(full, err))
		return -EINVAL;
	if (full->request_size && (full->request_size < 4096 || full->request_size > (1u << 30) ||
				   (full->request_size & (full->request_size - 1)))) {
		error_set(err, -EINVAL, "use", "the request size", -1, "%llu is out of range",
			  (unsigned long long)full->request_size);
		error_hint(err, "Take a power of two from 4K to 1G");
		return -EINVAL;
	}
	if (full->request_size > full->memory_limit) {
		error_set(err, -EINVAL, "keep within", "the memory limit", -1,
			  "a request of %llu bytes does not fit into %llu",
			  (unsigned long long)full->request_size,
			  (unsigned long long)full->memory_limit);
		error_hint(err, "Raise the memory limit or lower the request size");
		return -EINVAL;
	}
	if (full->lanes > LANES_MAX)
		return error_set(err, -EINVAL, "use", object, -1, "%u lanes are more than %u",
				 full->lanes, LANES_MAX);
	if (full->allocate && !full->allocated)
		return error_set(err, -EINVAL, "use", object, -1,
				 "there is no place for the memory to allocate");
	return full->inject && queue_inject_check(full->inject, err) ? -EINVAL : 0;
}
