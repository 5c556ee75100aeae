/* SPDX-License-Identifier: MIT */
/* From tensors to the header of a file; see safetensors_write.h. */
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "base/text.h"
#include "format/dtype.h"
#include "format/json_write.h"
#include "format/safetensors.h"
#include "format/safetensors_write.h"
#include "format/words.h"

#define PREFIX 8u	/* bytes that say how long the header is */
#define METADATA "__metadata__"

size_t safetensors_length(const char *text, size_t length)
{
	return length ? length : strlen(text);
}

static size_t name_length(const struct pen_save_tensor *tensor)
{
	return safetensors_length(tensor->name, tensor->name_length);
}

static int refuse(struct pen_error *err, const struct pen_save_tensor *tensor, const char *why,
		  const char *hint)
{
	char shown[WORDS_NAME];

	error_set(err, -EINVAL, "save", words_text(shown, tensor->name, name_length(tensor)), -1,
		  "%s", why);
	error_hint(err, "%s", hint);
	return -EINVAL;
}

int safetensors_bytes(const struct pen_save_tensor *tensor, uint64_t *bytes, struct pen_error *err)
{
	uint64_t elements = 1;
	bool fits = true;

	if (!tensor->name || (tensor->rank && !tensor->shape))
		return error_set(err, -EINVAL, "save", "a tensor", -1,
				 "it has no %s", tensor->name ? "shape" : "name");
	if (name_length(tensor) == strlen(METADATA) &&
	    !memcmp(tensor->name, METADATA, strlen(METADATA)))
		return refuse(err, tensor, "the format keeps this name for itself",
			      "Give the tensor another");
	if (!pen_dtype_name(tensor->dtype))
		return refuse(err, tensor, "its dtype is none of enum pen_dtype", "");
	for (uint32_t i = 0; i < tensor->rank; i++)
		fits &= !__builtin_mul_overflow(elements, tensor->shape[i], &elements);
	/* A dimension of 0 behind large ones is no excuse: readers count from the front, too. */
	if (!fits || !dtype_bytes(tensor->dtype, elements, bytes))
		return refuse(err, tensor, fits && elements <= UINT64_MAX / 64
						   ? "its elements do not fill whole bytes"
						   : "it is larger than 64 bits can count",
			      "Check its shape");
	return 0;
}

static int as_they_lie(const void *left, const void *right, void *context)
{
	const struct pen_save_tensor *tensors = context;
	const struct pen_save_tensor *a = &tensors[*(const size_t *)left];
	const struct pen_save_tensor *b = &tensors[*(const size_t *)right];

	if (a->dtype != b->dtype)
		return a->dtype > b->dtype ? -1 : 1;
	return text_order(a->name, name_length(a), b->name, name_length(b));
}

static void put_metadata(struct json_text *json, const struct safetensors_file *file)
{
	json_print(json, "\"" METADATA "\":{");
	for (size_t i = 0; i < file->metadata_count; i++) {
		const struct pen_metadata *pair = &file->metadata[i];

		if (i)
			json_put(json, ",", 1);
		json_quote(json, pair->key, safetensors_length(pair->key, pair->key_length),
			    false);
		json_put(json, ":", 1);
		json_quote(json, pair->value,
			    safetensors_length(pair->value, pair->value_length), false);
	}
	json_put(json, "}", 1);
}

static void put_tensor(struct json_text *json, const struct pen_save_tensor *tensor, uint64_t from,
		       uint64_t to)
{
	json_quote(json, tensor->name, name_length(tensor), false);
	json_print(json, ":{\"dtype\":\"%s\",\"shape\":[", pen_dtype_name(tensor->dtype));
	for (uint32_t i = 0; i < tensor->rank; i++)
		json_print(json, "%s%llu", i ? "," : "", (unsigned long long)tensor->shape[i]);
	json_print(json, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)from,
		   (unsigned long long)to);
}

static void put_header(struct json_text *json, const struct safetensors_file *file)
{
	uint64_t at = 0;

	json_put(json, "{", 1);
	if (file->metadata)
		put_metadata(json, file);
	for (size_t i = 0; i < file->count; i++) {
		size_t number = file->order[i];

		if (i || file->metadata)
			json_put(json, ",", 1);
		put_tensor(json, &file->tensors[number], at, at + file->bytes[number]);
		at += file->bytes[number];
	}
	json_put(json, "}", 1);
	while (((json->length & (file->align - 1)) || json->length < file->room) && !json->rc)
		json_put(json, " ", 1);
}

int safetensors_write(struct safetensors_file *file, char **header, size_t *size,
		      struct pen_error *err)
{
	struct json_text json = { .bytes = NULL };
	uint64_t length = 0;

	*header = NULL;
	if (file->count && !file->placed)
		qsort_r(file->order, file->count, sizeof(file->order[0]), as_they_lie,
			(void *)(uintptr_t)file->tensors);
	json_put(&json, (const char *)&length, PREFIX);
	put_header(&json, file);
	if (!json.rc && json.length - PREFIX > SAFETENSORS_HEADER_MAX) {
		json.rc = -EINVAL;
		error_set(err, -EINVAL, "save", file->name, -1,
			  "the header would have %zu bytes, and the format allows %u",
			  json.length - PREFIX, SAFETENSORS_HEADER_MAX);
		error_hint(err, "Save fewer tensors or less metadata");
	} else if (json.rc == -EILSEQ) {
		json.rc = error_set(err, -EINVAL, "save", file->name, -1,
				    "a name or its metadata is no UTF-8");
	} else if (json.rc) {
		error_sys(err, json.rc, "save", file->name, -1);
	}
	if (json.rc) {
		free(json.bytes);
		return json.rc;
	}
	length = htole64(json.length - PREFIX);
	memcpy(json.bytes, &length, PREFIX);
	*header = json.bytes;
	*size = json.length;
	return 0;
}
