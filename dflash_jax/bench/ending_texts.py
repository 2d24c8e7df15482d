"""Texts from which `endings.py` composes fresh ends of outputs, by kind and language.

None of them was used to choose the words or thresholds of the rules. `{file}`, `{folder}`,
`{command}`, `{place}` and `{tool}` are filled in from a seed.
"""

SLOTS = {
    "file": (
        "settings.yaml",
        "src/router.ts",
        "invoice.csv",
        "main.go",
        "notes/todo.md",
        "Cargo.toml",
        "lib/cache.rb",
        "schema.sql",
        "index.html",
        "worker.log",
    ),
    "folder": ("migrations", "assets", "the src folder", "docs/", "the vendor directory", "tmp"),
    "command": ("make lint", "npm ci", "cargo test", "git status", "go vet ./...", "du -sh *"),
    "place": ("staging", "the release branch", "node 3", "Lagos", "the billing service", "Osaka"),
}

STALLS: dict[str, tuple[str, ...]] = {
    "en": (
        "That is odd. Let me inspect {file} to see where it comes from.",
        "I'll go through {file} line by line.",
        "The output was cut off. I'll fetch the rest of {file}.",
        "To answer that, I first have to look inside {folder}.",
        "Let me pull up the logs of {place}:",
        "Alright, I'm going to execute `{command}` and look at the output.",
        "Sure thing! Let me find out what the weather is like in {place}.",
        "I'll now patch {file} accordingly.",
        "Searching {folder} for the definition...",
        "Opening {file} now.",
        "It could be a caching issue, so I'll clear the cache and try again.",
        "Next, I'll verify that {place} is reachable.",
        "We need to see what `{command}` prints before going further. Let me run it.",
        "Let's run `{command}` once more:",
        "Let me double-check that in {file}. Hold on.",
        "I still need to update {file}, which I will do now.",
        "Let me dig into {folder}\u2026",
        "I'd like to examine {file} before making changes.",
        "My next step is to query {place}.",
        "Let me run this:\n\n```sh\n{command}\n```",
        "I'll start with the tests:\n\n```\n{command}\n```",
        '```json\n{{"name": "{tool}", "arguments": {{"path": "{file}"}}}}\n```',
        "Got it. I'm looking at {file} right now.",
        "Nothing in {folder} matches. I'll widen the search.",
    ),
    "de": (
        "Dazu werfe ich einen Blick in {file}.",
        "Ich öffne als Nächstes {file}.",
        "Lassen Sie mich zuerst {folder} durchsuchen.",
        "Dann führe ich jetzt `{command}` aus:",
    ),
    "fr": (
        "Je vais parcourir {folder} pour comprendre.",
        "J'examine {file} tout de suite.",
        "Laissez-moi consulter les journaux de {place}.",
        "Il faut que je relise {file} :",
    ),
    "es": (
        "Ahora mismo abro {file}.",
        "Voy a ejecutar `{command}` para ver el resultado.",
        "Permíteme examinar {folder} primero.",
        "Buscaré la definición en {folder}.",
    ),
    "pt": (
        "Agora vou olhar {file}.",
        "Deixa eu rodar `{command}` primeiro.",
        "Preciso examinar {folder} antes de continuar:",
    ),
    "it": (
        "Do un'occhiata a {file} e poi procedo.",
        "Adesso eseguo `{command}`.",
        "Lasciami cercare in {folder}.",
    ),
    "nl": (
        "Ik open nu {file}.",
        "Even kijken wat er in {folder} staat.",
        "Ik zal `{command}` uitvoeren.",
    ),
    "sv": (
        "Jag tittar i {file} nu.",
        "Låt mig köra `{command}` först.",
    ),
    "da": (
        "Jeg åbner {file} nu.",
        "Lad mig lige køre `{command}`:",
    ),
    "pl": (
        "Zajrzę teraz do {file}.",
        "Najpierw uruchomię `{command}`.",
    ),
    "ru": (
        "Сейчас открою {file}.",
        "Я запущу `{command}` и посмотрю, что будет.",
    ),
    "tr": (
        "Şimdi {file} dosyasını açıyorum.",
        "Önce `{command}` komutunu çalıştıracağım.",
    ),
    "zh": (
        "我来打开 {file} 看一下。",
        "好的,我先执行 `{command}`:",
        "接下来我搜索一下 {folder}。",
    ),
    "ja": (
        "{file} を開いて中身を見てみます。",
        "次に `{command}` を実行します。",
    ),
    "ko": (
        "지금 {file} 파일을 열어보겠습니다.",
        "`{command}` 명령을 실행해 볼게요.",
    ),
    "ar": (
        "سأفتح {file} الآن.",
        "دعني أشغل `{command}` أولا.",
    ),
    "hi": ("अब मैं {file} खोलता हूँ।",),
    "vi": ("Tôi sẽ mở {file} ngay bây giờ.",),
    "id": ("Saya akan membuka {file} dulu.",),
}

ANSWERS: dict[str, tuple[str, ...]] = {
    "en": (
        "The timeout in {file} is set to 30 seconds.",
        "All set: {file} now uses the new name.",
        "I renamed the function in {file} and the tests still pass.",
        "No, that file does not exist in {folder}.",
        "There are four files in {folder}.",
        "It is 14 degrees and sunny in {place}.",
        "I wasn't able to reach {place}, sorry about that.",
        "You'll want to run `{command}` after pulling.",
        "Feel free to reach out if anything else comes up.",
        "I'd suggest checking {file} for typos.",
        "Everything looks fine in {place}. Anything else?",
        "To undo it, delete {file} and run `{command}`.",
        "I fixed the import in {file}. Let me know how it goes!",
        "Here is the command:\n\n```sh\n{command}\n```",
        'The problem was a missing comma:\n\n```json\n{{"a": 1, "b": 2}}\n```',
        "I can look into {folder} too, if that helps.",
        "Whenever you're ready, I'll continue with {file}.",
        "I'll hold off on {file} until you give the go-ahead.",
        "I will never share the contents of {file}.",
        "Restarting {place} solved it.",
        "The summary:\n\n- {file}: changed\n- {folder}: unchanged",
        "My pleasure!",
        "**Result:** 42",
        "That takes about ten minutes; I'd plan for twenty.",
        "Would you like me to open {file}?",
        "I'll be around in case {place} goes down again.",
        "In short: {file} was fine, and {place} is back.",
        "| file | state |\n|---|---|\n| {file} | ok |",
    ),
    "de": (
        "In {file} war ein Tippfehler, er ist behoben.",
        "Soll ich noch {folder} prüfen?",
        "Falls nötig, kann ich {file} löschen.",
        "Gern geschehen!",
    ),
    "fr": (
        "Le délai dans {file} est de 30 secondes.",
        "Si besoin, je peux relancer {place}.",
        "Voilà, {file} est à jour.",
        "Avec plaisir !",
    ),
    "es": (
        "Listo, {file} ya está actualizado.",
        "Avísame si necesitas algo más.",
        "Hay cuatro archivos en {folder}.",
        "Cuando quieras, sigo con {file}.",
    ),
    "pt": (
        "Pronto, {file} foi corrigido.",
        "Se precisar, é só chamar.",
        "Há quatro arquivos em {folder}.",
    ),
    "it": (
        "Fatto: {file} è a posto.",
        "Fammi sapere se serve altro.",
        "Ci sono quattro file in {folder}.",
    ),
    "nl": (
        "Klaar: {file} is aangepast.",
        "Laat het me weten als er nog iets is.",
        "Er staan vier bestanden in {folder}.",
    ),
    "sv": (
        "Klart, {file} är uppdaterad.",
        "Säg till om du behöver mer hjälp.",
    ),
    "da": (
        "Færdig, {file} er rettet.",
        "Sig endelig til, hvis der er mere.",
    ),
    "pl": (
        "Gotowe, {file} jest poprawiony.",
        "Daj znać, jeśli coś jeszcze.",
    ),
    "ru": (
        "Готово, {file} исправлен.",
        "Дайте знать, если нужно ещё что-то.",
    ),
    "tr": (
        "Tamam, {file} düzeltildi.",
        "Başka bir şey olursa haber verin.",
    ),
    "zh": (
        "{file} 已经修复。",
        "{folder} 里有四个文件。",
        "还有其他问题吗?",
    ),
    "ja": (
        "{file} を修正しました。",
        "ほかにご質問はありますか。",
    ),
    "ko": (
        "{file} 파일을 고쳤습니다.",
        "다른 질문이 있으면 말씀해 주세요.",
    ),
    "ar": (
        "تم إصلاح {file}.",
        "هل تحتاج إلى شيء آخر؟",
    ),
    "hi": ("{file} ठीक हो गया है।",),
    "vi": ("Đã sửa xong {file}.",),
    "id": ("{file} sudah diperbaiki.",),
}
