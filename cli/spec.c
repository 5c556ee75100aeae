/* SPDX-License-Identifier: MIT */
/*
 * The shape of a made-up model; see spec.h.
 *
 *	text --> properties --> tensors in the order of the model --> files, sorted --> headers
 *	JSON file ----------------------------------------------------^
 *
 * Which tensor lies where in which file, what the headers and the index say: that is the library's
 * affair (pen_layout_make). Only a number of shards that the user wants is dealt out here.
 */
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/error.h"
#include "base/text.h"
#include "options.h"
#include "spec.h"

#define FILES_MAX 200			/* all are open at the same time */
#define TENSORS_MAX ((size_t)1 << 20)

/* ------------------------------------------------------------------------------ properties -- */

struct properties {
	uint64_t layers, hidden, intermediate, heads, kv, head_dim, vocab, shards, shard_size;
	bool qwen3;		/* norms of q and k; otherwise qwen2: biases of q, k and v */
	bool tied;		/* the embedding is the output as well */
	uint64_t positions;	/* these three for config.json only */
	double rope, epsilon;
};

static const struct properties tiny = {
	.layers = 2, .hidden = 64, .intermediate = 128, .heads = 4, .kv = 2, .vocab = 256,
	.shards = 1, .qwen3 = true, .tied = true, .positions = 4096, .rope = 1e6, .epsilon = 1e-6,
};
static const struct properties qwen3_600m = {
	.layers = 28, .hidden = 1024, .intermediate = 3072, .heads = 16, .kv = 8, .head_dim = 128,
	.vocab = 151936, .shards = 1, .qwen3 = true, .tied = true, .positions = 40960,
	.rope = 1e6, .epsilon = 1e-6,
};
static const struct properties qwen2_7b = {
	.layers = 28, .hidden = 3584, .intermediate = 18944, .heads = 28, .kv = 4, .head_dim = 128,
	.vocab = 152064, .shard_size = 4000000000, .positions = 131072, .rope = 1e6,
	.epsilon = 1e-6,
};

/* The limits keep every sum of bytes far below 2^63. */
static const struct property {
	const char *name;
	size_t where;
	uint64_t max;
} numbers[] = {
	{ "layers", offsetof(struct properties, layers), 4096 },
	{ "hidden", offsetof(struct properties, hidden), 1 << 20 },
	{ "intermediate", offsetof(struct properties, intermediate), 1 << 22 },
	{ "heads", offsetof(struct properties, heads), 1024 },
	{ "kv", offsetof(struct properties, kv), 1024 },
	{ "head-dim", offsetof(struct properties, head_dim), 4096 },
	{ "vocab", offsetof(struct properties, vocab), 1 << 24 },
	{ "shards", offsetof(struct properties, shards), FILES_MAX },
	{ "shard-size", offsetof(struct properties, shard_size), INT64_MAX },
	{ NULL, 0, 0 },
};

/* The words that stand alone; of each pair only one can be. */
static const char *const flags[] = { "qwen2", "qwen3", "tied", "untied", NULL };

#define NUMBERS (sizeof(numbers) / sizeof(numbers[0]) - 1)
#define PAIRS (sizeof(flags) / sizeof(flags[0]) / 2)

/* What has been said already: the word for each number, and for each pair of flags. */
struct given {
	const char *numbers[NUMBERS], *pairs[PAIRS];
};

static int bad_item(const char *item, struct pen_error *err)
{
	const char *near = options_nearest(item, numbers, sizeof(numbers[0]));
	bool preset = item[0] >= '0' && item[0] <= '9';

	if (!near)
		near = options_nearest(item, flags, sizeof(flags[0]));
	error_set(err, -EINVAL, "make", "a model", -1,
		  preset ? "there is no model '%s'" : "'%s' is none of its properties", item);
	if (preset)
		error_hint(err, "Those that are known are 0.6b and 7b; others are made from "
				"properties, such as layers=16,hidden=2048");
	if (near)
		error_hint(err, "Did you mean %s? See penstock-make-model(1)", near);
	else
		error_hint(err, "Write 0.6b, 7b, properties such as layers=4,hidden=256, or a file "
				"that ends in .json; see penstock-make-model(1)");
	return -EINVAL;
}

static int contradiction(const char *one, const char *other, struct pen_error *err)
{
	if (!strcmp(one, other))
		error_set(err, -EINVAL, "make", "a model", -1, "'%s' is given twice", one);
	else
		error_set(err, -EINVAL, "make", "a model", -1,
			  "'%s' and '%s' rule each other out", one, other);
	error_hint(err, "Keep one of them");
	return -EINVAL;
}

static int set_flag(struct properties *model, struct given *given, const char *item, bool first,
		    struct pen_error *err)
{
	bool known = !strcmp(item, "0.6b") || !strcmp(item, "7b");

	if (known && !first)
		return error_set(err, -EINVAL, "make", "a model", -1,
				 "%s must come first: it sets all properties", item);
	if (known) {
		*model = item[0] == '7' ? qwen2_7b : qwen3_600m;
		return 0;
	}
	for (size_t i = 0; i < NUMBERS; i++) {
		if (strcmp(item, numbers[i].name))
			continue;
		error_set(err, -EINVAL, "make", "a model", -1, "'%s' has no value", item);
		error_hint(err, "Write %s=%s", item, strcmp(item, "shard-size") ? "N" : "SIZE");
		return -EINVAL;
	}
	for (size_t i = 0; flags[i]; i++) {
		const char **before = &given->pairs[i / 2];

		if (strcmp(item, flags[i]))
			continue;
		if (*before)
			return contradiction(*before, item, err);
		*before = item;
		if (i / 2)
			model->tied = item[0] == 't';
		else
			model->qwen3 = item[4] == '3';
		return 0;
	}
	return bad_item(item, err);
}

/* A property that is given twice, or `shards` and `shard-size`. */
static int note_number(struct given *given, const char *name, struct pen_error *err)
{
	for (size_t i = 0; i < NUMBERS; i++) {
		const char *other = given->numbers[i];
		bool both = other && !strncmp(name, "shard", 5) && !strncmp(other, "shard", 5);

		if (other && (both || !strcmp(name, other)))
			return contradiction(other, name, err);
		if (!strcmp(name, numbers[i].name))
			given->numbers[i] = name;
	}
	return 0;
}

static int set_number(struct properties *model, struct given *given, const char *name,
		      const char *value, struct pen_error *err)
{
	const struct property *property = numbers;
	uint64_t number = 0;
	bool is_size = !strcmp(name, "shard-size");
	int rc;

	while (property->name && strcmp(property->name, name))
		property++;
	for (size_t i = 0; !property->name && flags[i]; i++)
		if (!strcmp(name, flags[i]))
			return error_set(err, -EINVAL, "use", name, -1, "it takes no value");
	if (!property->name)
		return bad_item(name, err);
	rc = note_number(given, name, err);
	if (rc)
		return rc;
	rc = is_size ? text_to_size(value, &number)
		     : text_to_number(value, property->max, &number);
	if (rc || !number || number > property->max)
		return error_set(err, -EINVAL, "use", name, -1, "'%s' is not a %s from 1 to %llu",
				 value, is_size ? "size" : "whole number",
				 (unsigned long long)property->max);
	*(uint64_t *)((char *)model + property->where) = number;
	if (is_size)
		model->shards = 0;	/* what was there is not the user's */
	return 0;
}

/* What no transformer could be built from. */
static int check_properties(struct properties *model, struct pen_error *err)
{
	if (!model->head_dim && model->hidden % model->heads) {
		error_set(err, -EINVAL, "make", "a model", -1,
			  "hidden=%llu cannot be divided among heads=%llu",
			  (unsigned long long)model->hidden, (unsigned long long)model->heads);
		error_hint(err, "Choose others, or give head-dim");
		return -EINVAL;
	}
	if (!model->head_dim)
		model->head_dim = model->hidden / model->heads;
	if (model->heads % model->kv)
		return error_set(err, -EINVAL, "make", "a model", -1,
				 "heads=%llu cannot be divided among kv=%llu",
				 (unsigned long long)model->heads, (unsigned long long)model->kv);
	if (model->head_dim % 2)
		return error_set(err, -EINVAL, "make", "a model", -1,
				 "the size of a head, %llu, is odd",
				 (unsigned long long)model->head_dim);
	return 0;
}

static int parse_properties(struct properties *model, char *text, struct pen_error *err)
{
	struct given given = { .numbers = { NULL } };
	int rc = 0;
	bool first = true;

	*model = tiny;
	for (char *item = text, *next; item && !rc; item = next, first = false) {
		char *value;

		next = strchr(item, ',');
		if (next)
			*next++ = 0;
		value = strchr(item, '=');
		if (value)
			*value++ = 0;
		rc = value ? set_number(model, &given, item, value, err)
			   : set_flag(model, &given, item, first, err);
	}
	return rc ? rc : check_properties(model, err);
}

/* --------------------------------------------------------------------------------- tensors -- */

static int no_memory(struct pen_error *err)
{
	return error_sys(err, -ENOMEM, "make", "a model", -1);
}

/* Room for one more; doubled whenever a power of two is reached. */
static struct spec_tensor *new_tensor(struct spec *spec)
{
	size_t count = spec->tensor_count;
	struct spec_tensor *grown = spec->tensors;

	if (!(count & (count - 1)))
		grown = realloc(grown, (count ? 2 * count : 1) * sizeof(*grown));
	if (!grown)
		return NULL;
	spec->tensors = grown;
	grown += spec->tensor_count++;
	*grown = (struct spec_tensor){ .name = NULL };
	return grown;
}

/* A tensor of the model, of layer `layer` or (-1) of none; `columns` 0: a vector. */
static int add(struct spec *spec, const char *name, int layer, uint64_t rows, uint64_t columns)
{
	struct spec_tensor *tensor = new_tensor(spec);
	char full[128];

	if (!tensor)
		return -ENOMEM;
	if (layer >= 0)
		snprintf(full, sizeof(full), "model.layers.%d.%s.weight", layer, name);
	else
		snprintf(full, sizeof(full), "%s.weight", name);
	tensor->name = strdup(full);
	tensor->dtype = PEN_BF16;
	tensor->rank = columns ? 2 : 1;
	tensor->shape[0] = rows;
	tensor->shape[1] = columns;
	tensor->bytes = 2 * rows * (columns ? columns : 1);
	return tensor->name ? 0 : -ENOMEM;
}

/* A projection of the attention; qwen2 has biases. */
static int add_projection(struct spec *spec, const struct properties *model, const char *name,
			  int layer, uint64_t rows)
{
	int rc = add(spec, name, layer, rows, model->hidden);

	if (rc || model->qwen3)
		return rc;
	rc = add(spec, name, layer, rows, 0);
	if (!rc)
		strcpy(strrchr(spec->tensors[spec->tensor_count - 1].name, '.'), ".bias");
	return rc;
}

static int add_layer(struct spec *spec, const struct properties *model, int layer)
{
	uint64_t q = model->heads * model->head_dim, kv = model->kv * model->head_dim;
	int rc = add_projection(spec, model, "self_attn.q_proj", layer, q);

	if (!rc)
		rc = add_projection(spec, model, "self_attn.k_proj", layer, kv);
	if (!rc)
		rc = add_projection(spec, model, "self_attn.v_proj", layer, kv);
	if (!rc)
		rc = add(spec, "self_attn.o_proj", layer, model->hidden, q);
	if (!rc && model->qwen3)
		rc = add(spec, "self_attn.q_norm", layer, model->head_dim, 0);
	if (!rc && model->qwen3)
		rc = add(spec, "self_attn.k_norm", layer, model->head_dim, 0);
	if (!rc)
		rc = add(spec, "mlp.gate_proj", layer, model->intermediate, model->hidden);
	if (!rc)
		rc = add(spec, "mlp.up_proj", layer, model->intermediate, model->hidden);
	if (!rc)
		rc = add(spec, "mlp.down_proj", layer, model->hidden, model->intermediate);
	if (!rc)
		rc = add(spec, "input_layernorm", layer, model->hidden, 0);
	if (!rc)
		rc = add(spec, "post_attention_layernorm", layer, model->hidden, 0);
	return rc;
}

static int add_tensors(struct spec *spec, const struct properties *model, struct pen_error *err)
{
	int rc = add(spec, "model.embed_tokens", -1, model->vocab, model->hidden);

	for (int i = 0; !rc && i < (int)model->layers; i++)
		rc = add_layer(spec, model, i);
	if (!rc)
		rc = add(spec, "model.norm", -1, model->hidden, 0);
	if (!rc && !model->tied)
		rc = add(spec, "lm_head", -1, model->vocab, model->hidden);
	return rc ? no_memory(err) : 0;
}

/* ---------------------------------------------------------------------------------- shards -- */

/*
 * Give each tensor its file: the next one where `limit` would be passed. With `exactly`, one also
 * begins where there are only as many tensors left as files; returns how many there are.
 */
static size_t deal_out(struct spec *spec, uint64_t limit, size_t exactly)
{
	uint64_t size = 0;
	size_t file = 0;

	for (size_t i = 0; i < spec->tensor_count; i++) {
		struct spec_tensor *tensor = &spec->tensors[i];
		size_t left = spec->tensor_count - i;

		if (i && (size + tensor->bytes > limit || left + file < exactly)) {
			file++;
			size = 0;
		}
		size += tensor->bytes;
		tensor->file = file;
	}
	return file + 1;
}

/* The smallest limit that makes no more than `count` files makes them most alike. */
static uint64_t find_limit(struct spec *spec, size_t count)
{
	uint64_t low = 0, high = spec->bytes;

	while (high - low > 1) {
		uint64_t middle = low + (high - low) / 2;

		if (deal_out(spec, middle, 0) <= count)
			high = middle;
		else
			low = middle;
	}
	return high;
}

static int cut(struct spec *spec, const struct properties *model, struct pen_error *err)
{
	size_t count = model->shards;

	if (count > spec->tensor_count)
		return error_set(err, -EINVAL, "use", "shards", -1,
				 "%zu are more than the %zu tensors", count, spec->tensor_count);
	for (size_t i = 0; i < spec->tensor_count; i++)
		spec->bytes += spec->tensors[i].bytes;
	if (count)
		deal_out(spec, find_limit(spec, count), count);
	return 0;
}

/* ---------------------------------------------------------------------------------- layout -- */

/* Tensors file by file as they lie, with their offsets; files as the library has them. */
static int take_over(struct spec *spec, struct pen_error *err)
{
	const struct pen_layout *layout = spec->layout;
	struct spec_tensor *sorted = calloc(spec->tensor_count + 1, sizeof(sorted[0]));
	size_t at = 0;

	spec->files = calloc(layout->file_count, sizeof(spec->files[0]));
	if (!sorted || !spec->files) {
		free(sorted);
		return no_memory(err);
	}
	spec->file_count = layout->file_count;
	for (size_t i = 0; i < layout->file_count; i++) {
		const struct pen_layout_file *file = &layout->files[i];

		spec->files[i] = (struct spec_file){
			.name = file->name, .header = file->header,
			.header_size = file->header_size, .first = at,
			.count = file->tensor_count, .size = file->size,
		};
		for (size_t k = 0; k < file->tensor_count; k++) {
			sorted[at] = spec->tensors[file->tensors[k]];
			sorted[at++].offset = layout->places[file->tensors[k]].offset;
		}
	}
	free(spec->tensors);
	spec->tensors = sorted;
	spec->bytes = layout->bytes;
	spec->index = layout->file_count > 1 ? layout->index : NULL;
	return 0;
}

static int lay_out(struct spec *spec, const struct pen_save_options *options,
		   struct pen_error *err)
{
	struct pen_save_tensor *tensors = calloc(spec->tensor_count + 1, sizeof(tensors[0]));
	int rc;

	if (!tensors)
		return no_memory(err);
	for (size_t i = 0; i < spec->tensor_count; i++)
		tensors[i] = (struct pen_save_tensor){
			.name = spec->tensors[i].name, .dtype = spec->tensors[i].dtype,
			.rank = spec->tensors[i].rank, .shape = spec->tensors[i].shape,
			.file = (uint32_t)spec->tensors[i].file,
		};
	rc = pen_layout_make(tensors, spec->tensor_count, options, &spec->layout, err);
	free(tensors);
	if (rc)
		return rc;
	if (spec->layout->file_count > FILES_MAX)
		return error_set(err, -EINVAL, "use", "shard-size", -1,
				 "it makes %zu files, and %d are the most",
				 spec->layout->file_count, FILES_MAX);
	return take_over(spec, err);
}

/* -------------------------------------------------------------------- the files beside them -- */

/* A JSON text as people and the Hugging Face libraries write it. */
static char *pretty(json_t *object)
{
	char *text = json_dumps(object, JSON_INDENT(2) | JSON_REAL_PRECISION(9)), *whole = NULL;

	json_decref(object);
	if (text && asprintf(&whole, "%s\n", text) < 0)
		whole = NULL;
	free(text);
	return whole;
}

static int make_config(struct spec *spec, const struct properties *model, struct pen_error *err)
{
	json_t *object = json_object(), *classes = json_array();

#define SET(name, value) json_object_set_new(object, name, value)
	json_array_append_new(classes, json_string(model->qwen3 ? "Qwen3ForCausalLM"
								: "Qwen2ForCausalLM"));
	SET("architectures", classes);
	SET("model_type", json_string(model->qwen3 ? "qwen3" : "qwen2"));
	SET("torch_dtype", json_string("bfloat16"));
	SET("vocab_size", json_integer((json_int_t)model->vocab));
	SET("hidden_size", json_integer((json_int_t)model->hidden));
	SET("intermediate_size", json_integer((json_int_t)model->intermediate));
	SET("num_hidden_layers", json_integer((json_int_t)model->layers));
	SET("num_attention_heads", json_integer((json_int_t)model->heads));
	SET("num_key_value_heads", json_integer((json_int_t)model->kv));
	SET("head_dim", json_integer((json_int_t)model->head_dim));
	SET("max_position_embeddings", json_integer((json_int_t)model->positions));
	SET("hidden_act", json_string("silu"));
	SET("initializer_range", json_real(0.02));
	SET("rms_norm_eps", json_real(model->epsilon));
	SET("rope_theta", json_real(model->rope));
	SET("attention_bias", json_false());
	SET("attention_dropout", json_real(0));
	SET("use_sliding_window", json_false());
	SET("use_cache", json_true());
	SET("tie_word_embeddings", json_boolean(model->tied));
#undef SET
	spec->config = pretty(object);
	return spec->config ? 0 : no_memory(err);
}

static int from_properties(struct spec *spec, const char *text, struct pen_error *err)
{
	const struct pen_metadata format = { .key = "format", .value = "pt" };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	char *copy = strdup(text);
	struct properties model;
	int rc = copy ? parse_properties(&model, copy, err) : no_memory(err);

	if (!rc)
		rc = add_tensors(spec, &model, err);
	if (!rc)
		rc = cut(spec, &model, err);
	if (!rc) {
		options.metadata = &format;
		options.metadata_count = 1;
		options.file_count = model.shards;
		options.shard_size = model.shards ? 0 : model.shard_size;
		rc = lay_out(spec, &options, err);
	}
	if (!rc)
		rc = make_config(spec, &model, err);
	free(copy);
	return rc;
}

/* ------------------------------------------------------------------------------- JSON file -- */

/* A mistake in the file of the user; `what` says where. */
static int wrong(const char *path, struct pen_error *err, const char *format, ...)
{
	char text[200];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	error_set(err, -EINVAL, "use", path, -1, "%s", text);
	error_hint(err, "penstock-make-model(1) says what it must hold");
	return -EINVAL;
}

static int find_dtype(const char *name)
{
	for (int dtype = 0; name && dtype < PEN_DTYPES; dtype++)
		if (!strcmp(name, pen_dtype_name(dtype)))
			return dtype;
	return -1;
}

static int set_shape(struct spec_tensor *tensor, const json_t *shape, const char *path,
		     struct pen_error *err)
{
	uint64_t bits = pen_dtype_bits(tensor->dtype);
	const json_t *size;
	size_t i;

	if (!json_is_array(shape) || json_array_size(shape) > SPEC_RANK_MAX)
		return wrong(path, err, "'%.80s' has no shape of up to %d numbers", tensor->name,
			     SPEC_RANK_MAX);
	json_array_foreach(shape, i, size) {
		if (!json_is_integer(size) || json_integer_value(size) < 0 ||
		    __builtin_mul_overflow(bits, (uint64_t)json_integer_value(size), &bits) ||
		    bits > (uint64_t)1 << 56)
			return wrong(path, err, "the shape of '%.80s' is no size that can be had",
				     tensor->name);
		tensor->shape[tensor->rank++] = (uint64_t)json_integer_value(size);
	}
	tensor->bytes = bits / 8;
	return bits % 8 ? wrong(path, err, "'%.80s' does not fill whole bytes", tensor->name) : 0;
}

/* A key that is none of `known` may be a slip, and would be ignored. */
static int check_keys(const json_t *object, const char *const known[], const char *where,
		      const char *path, struct pen_error *err)
{
	const json_t *value;
	const char *key;

	json_object_foreach((json_t *)(uintptr_t)object, key, value) {
		size_t i = 0;

		while (known[i] && strcmp(known[i], key))
			i++;
		if (!known[i])
			return wrong(path, err, "%s has the key '%.80s', which means nothing here",
				     where, key);
	}
	return 0;
}

/* `number` is that of the tensor in its file, from 1 on. */
static int read_tensor(struct spec *spec, size_t file, size_t number, const json_t *entry,
		       const char *path, struct pen_error *err)
{
	static const char *const keys[] = { "name", "dtype", "shape", NULL };
	const char *name = json_string_value(json_object_get(entry, "name"));
	const char *dtype = json_string_value(json_object_get(entry, "dtype"));
	const char *file_name = spec->names[file];
	struct spec_tensor *tensor;
	int rc;

	if (!json_is_object(entry))
		return wrong(path, err, "tensor %zu of '%.80s' is no object", number, file_name);
	rc = check_keys(entry, keys, "a tensor", path, err);
	if (rc)
		return rc;
	if (!name)
		return wrong(path, err, "tensor %zu of '%.80s' has no name", number, file_name);
	if (!strcmp(name, "__metadata__"))
		return wrong(path, err, "no tensor can be called '__metadata__': that is where a "
			     "file has its metadata");
	if (spec->tensor_count == TENSORS_MAX)
		return wrong(path, err, "it has more than %zu tensors", TENSORS_MAX);
	tensor = new_tensor(spec);
	if (!tensor)
		return no_memory(err);
	tensor->file = file;
	tensor->name = strdup(name);
	if (!tensor->name)
		return no_memory(err);
	tensor->dtype = find_dtype(dtype);
	if (tensor->dtype < 0)
		return wrong(path, err, "the dtype of '%.80s' is none of safetensors'", name);
	return set_shape(tensor, json_object_get(entry, "shape"), path, err);
}

static bool plain_name(const char *name)
{
	size_t length = name ? strlen(name) : 0;
	const char *ending = ".safetensors";

	return length > strlen(ending) && length < 200 && !strchr(name, '/') &&
	       text_ends_with(name, ending);
}

static int read_file(struct spec *spec, size_t number, const json_t *entry, const char *path,
		     struct pen_error *err)
{
	static const char *const keys[] = { "name", "tensors", NULL };
	const char *name = json_string_value(json_object_get(entry, "name"));
	const json_t *tensors = json_object_get(entry, "tensors"), *tensor;
	size_t i;
	int rc = check_keys(entry, keys, "a file", path, err);

	if (rc)
		return rc;
	if (!plain_name(name))
		return wrong(path, err, "the name of file %zu is no plain NAME.safetensors",
			     number + 1);
	for (i = 0; i < number; i++)
		if (!strcmp(spec->names[i], name))
			return wrong(path, err, "two files are called '%.100s'", name);
	if (!json_is_array(tensors))
		return wrong(path, err, "'%.100s' has no list of tensors", name);
	spec->names[number] = strdup(name);
	if (!spec->names[number])
		return no_memory(err);
	json_array_foreach(tensors, i, tensor) {
		rc = read_tensor(spec, number, i + 1, tensor, path, err);
		if (rc)
			return rc;
		spec->bytes += spec->tensors[spec->tensor_count - 1].bytes;
		if (spec->bytes > (uint64_t)1 << 60)
			return wrong(path, err, "it is too large");
	}
	return 0;
}

/* Texts only; they stay with the JSON that they come from. */
static int read_metadata(const json_t *metadata, struct pen_save_options *options,
			 const char *path, struct pen_error *err)
{
	struct pen_metadata *pairs;
	const json_t *value;
	const char *key;

	if (metadata && !json_is_object(metadata))
		return wrong(path, err, "its metadata is no object");
	if (!json_object_size(metadata))
		return 0;
	options->metadata = pairs = calloc(json_object_size(metadata), sizeof(pairs[0]));
	if (!pairs)
		return no_memory(err);
	json_object_foreach((json_t *)(uintptr_t)metadata, key, value) {
		if (!json_is_string(value))
			return wrong(path, err, "the metadata '%.100s' is no text", key);
		pairs[options->metadata_count++] = (struct pen_metadata){
			.key = key, .value = json_string_value(value),
			.value_length = json_string_length(value),
		};
	}
	return 0;
}

static int read_files(struct spec *spec, const json_t *root, struct pen_save_options *options,
		      const char *path, struct pen_error *err)
{
	const json_t *files = json_object_get(root, "files"), *file;
	static const char *const keys[] = { "files", "metadata", NULL };
	size_t i;
	int rc = check_keys(root, keys, "it", path, err);

	if (rc)
		return rc;
	if (!json_is_array(files) || !json_array_size(files) || json_array_size(files) > FILES_MAX)
		return wrong(path, err, "it has no list of 1 to %d files", FILES_MAX);
	rc = read_metadata(json_object_get(root, "metadata"), options, path, err);
	if (rc)
		return rc;
	spec->names = calloc(json_array_size(files), sizeof(spec->names[0]));
	if (!spec->names)
		return no_memory(err);
	json_array_foreach(files, i, file) {
		spec->name_count++;
		rc = read_file(spec, i, file, path, err);
		if (rc)
			return rc;
	}
	/* Its index would list nothing, and no reader takes that. */
	if (spec->name_count > 1 && !spec->tensor_count)
		return wrong(path, err, "it has several files and not one tensor");
	options->files = (const char *const *)spec->names;
	options->file_count = spec->name_count;
	return lay_out(spec, options, err);
}

static int from_file(struct spec *spec, const char *path, struct pen_error *err)
{
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	FILE *file = fopen(path, "re");
	json_error_t problem;
	json_t *root;
	int rc;

	if (!file) {
		rc = error_sys(err, -errno, "open", path, -1);
		error_hint(err, "Check the path; what ends in .json is a list of tensors");
		return rc;
	}
	root = json_loadf(file, JSON_REJECT_DUPLICATES, &problem);
	fclose(file);
	if (!root)
		return wrong(path, err, "line %d: %s", problem.line, problem.text);
	rc = read_files(spec, root, &options, path, err);
	free((void *)(uintptr_t)options.metadata);
	json_decref(root);
	return rc;
}

/* ----------------------------------------------------------------------------------- whole -- */

int spec_init(struct spec *spec, const char *text, struct pen_error *err)
{
	size_t length = strlen(text);
	bool is_file = length > 5 && !strcmp(text + length - 5, ".json");
	int rc;

	*spec = (struct spec){ .files = NULL };
	rc = is_file ? from_file(spec, text, err) : from_properties(spec, text, err);
	if (rc)
		spec_fini(spec);
	return rc;
}

void spec_fini(struct spec *spec)
{
	for (size_t i = 0; i < spec->tensor_count; i++)
		free(spec->tensors[i].name);
	for (size_t i = 0; i < spec->name_count; i++)
		free(spec->names[i]);
	free(spec->names);
	free(spec->tensors);
	free(spec->files);
	free(spec->config);
	pen_layout_free(spec->layout);
	*spec = (struct spec){ .files = NULL };
}
