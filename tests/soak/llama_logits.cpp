// Logits and greedy tokens of a GGUF file by llama.cpp, for test_llama_cpp.py.
//
//   g++ -std=c++17 -I$SOURCE/include -I$SOURCE/ggml/include llama_logits.cpp -o llama_logits
//       $BUILD/src/libllama.a $BUILD/ggml/src/libggml{,-cpu,-base}.a -fopenmp -lpthread -ldl
//
//   llama_logits MODEL OUT COUNT ID...   writes float32 logits [IDs, vocabulary] of all positions
//   llama_logits MODEL OUT COUNT -t TEXT   of a text, encoded with its special tokens
//
// Prints the ids, then COUNT greedy tokens, or fewer before an end token.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llama.h"

static void quiet(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static void add(llama_batch & batch, llama_token id, int position) {
    const int i = batch.n_tokens++;
    batch.token[i] = id;
    batch.pos[i] = position;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
}

int main(int argc, char ** argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: %s MODEL OUT COUNT ID... | -t TEXT\n", argv[0]);
        return 2;
    }
    llama_log_set(quiet, nullptr);
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::vector<llama_token> ids;
    if (std::string(argv[4]) == "-t") {
        const std::string text = argv[5];
        ids.resize(text.size() + 8);
        ids.resize(llama_tokenize(vocab, text.data(), text.size(), ids.data(), ids.size(), true, true));
    } else {
        for (int i = 4; i < argc; ++i) {
            ids.push_back(atoi(argv[i]));
        }
    }
    const int count = atoi(argv[3]), total = ids.size() + count;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = total + 8;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) {
        return 1;
    }
    llama_batch batch = llama_batch_init(total + 8, 0, 1);
    for (size_t i = 0; i < ids.size(); ++i) {
        printf("%d ", ids[i]);
        add(batch, ids[i], i);
    }
    printf("\n");
    FILE * out = fopen(argv[2], "wb");
    if (!out || llama_decode(context, batch)) {
        return 1;
    }
    const int width = llama_vocab_n_tokens(vocab);
    for (size_t i = 0; i < ids.size(); ++i) {
        fwrite(llama_get_logits_ith(context, i), sizeof(float), width, out);
    }
    fclose(out);
    const float * logits = llama_get_logits_ith(context, ids.size() - 1);
    for (int position = ids.size(); position < total; ++position) {
        int best = 0;
        for (int i = 1; i < width; ++i) {
            best = logits[i] > logits[best] ? i : best;
        }
        printf("%d ", best);
        if (llama_vocab_is_eog(vocab, best)) {
            break;
        }
        batch.n_tokens = 0;
        add(batch, best, position);
        if (llama_decode(context, batch)) {
            return 1;
        }
        logits = llama_get_logits_ith(context, 0);
    }
    printf("\n");
    return 0;
}
