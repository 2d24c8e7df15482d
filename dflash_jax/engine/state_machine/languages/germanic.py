"""Announcements in German, Dutch, Swedish, Norwegian and Danish."""

from dflash_jax.engine.state_machine.languages.language import language

GERMAN = language(
    future=(
        r"ich (?:werde|will|muss|möchte)|(?:werde|will|muss|möchte) ich"
        r"|lass(?:t|en sie)? (?:mich|uns)|mal (?:sehen|schauen)"
        r"|(?:ich \w+e|\w+e ich)(?=\b.* (?:jetzt|nun|gleich|kurz|sofort|schnell|zuerst|mal)\b)"
        r"|(?:(?:mein )?(?:als )?nächste[rs]?|erste[rs]?) schritt:?(?: ist)?"
    ),
    opens=(
        r"ich(?= (?!\w+te\b)\w+e\b)|(?!\w+te\b)\w+e ich\b|ich soll|soll ich|\w+en wir\b"
        r"|(?:ich )?(?:teste|starte)\b(?: ich)?|als nächstes|zunächst|zuerst|jetzt"
    ),
    acts=(
        r"les(?:e|en)\b|prüf|schau|\bsehe?n?\b|anseh|nachseh|öffn|start|führ|such|find|test"
        r"|\bhol|ruf|list|untersuch|bearbeit|änder|korrigier|beheb|schreib|erstell|lösch|install"
        r"|berechn|vergleich|\blad|leg\w* .*\ban\b|anleg|abfrag|analys|kontroll|aktualis|ersetz"
        r"|kopier|verschieb|probier|versuch|beginn|\bfang|mach|wechs|bau|kompil|sortier|zähl"
        r"|durch(?:geh|such|lauf|führ)|weiter|wirf|werfe|inspizier|reparier|übersetz|speicher|füg"
        r"|\brechn|nachrechn|kümmer|gleich\w* .*\bab\b|abgleich|heraus|\bhak|nachhak|klär|klick"
        r"|knöpf|log"
        r"|\bgeh|\bnehme\b.*\bvor\b|stell\w* .*(?:um|ein|her)\b|setz\w* .*(?:um|auf|zurück|ein)\b"
        r"|pack|schick|send|entfern|ergänz|erweiter|verbind|konfigur|\bricht|aufräum|räum\w* .*auf"
        r"|bereinig|sicher|beend|stopp|klon|zieh|\btrag|eintrag|buch|generier|extrahier|überprüf"
        r"|validier|mess|protokoll|deploy|commit|merg|push|pull|patch|debug|refaktor|umbenenn"
        r"|benenn\w* .*um|einricht|eingrenz|grenz|verfolg|ermittl|ermittel|recherchier|\bschließ"
        r"|schalt|druck|zeichn|verschaff|werf|wiederhol|zerleg|passe?\b.*\ban\b|anpass|aufruf|nehm"
    ),
    idle=(
        r"\b(?:merke|merken|beacht|berücksicht|erinner|gedulde|weiß|wissen|dank|gern(?:e)? (?:zur"
        r"|zu)"
        r"|nicht|nie(?:mals|mand\w*)?\b|kein\w*|wart|habe|hatte|kenne|denke|glaube|hoffe|verstehe"
        r"|brauche|bitte"
        r"|danke"
        r"|empfehle|könnte|würde|freu|bleib|stehe|melde|vermute|nehme an|finde,|schlage|rate\b"
        r"|meine,"
        r"|bedauer|entschuldig|lasse (?:es|das)|sage|erkläre|erwähn|helf|sehe (?:kein|nur"
        r"|dass|,))"
    ),
    asks=r"\?|\b(?:wenn|falls|sobald|sofern|ob du|ob sie|möchten sie|willst du|soll ich|künftig"
    r"|in zukunft|später|du kannst|sie können|kannst du|können sie)\b",
)


DUTCH = language(
    future=r"ik (?:ga|zal|moet|wil)|laat (?:me|mij|ik|ons)|we gaan|(?:volgende|eerste) stap:?",
    opens=r"ik(?= (?!\w{3,}[dt]e\b)\w+)|(?:ga|zal|moet|wil|kijk|lees"
    r"|open|controleer"
    r"|zoek|start"
    r"|voer|draai|test|pak|haal|bekijk|schrijf|maak) ik|(?:eens )?even(?= \w+en\b)",
    acts=(
        r"controleer|check|\blees|lezen|kijk|bekijk|open|voer|zoek|start|test|analyseer|draai"
        r"|onderzoek"
        r"|pas\w* .*aan|aanpass|wijzig|verbeter|herstel|repareer|maak|schrijf|schrijv|verwijder"
        r"|installeer|haal|\bhal|download|bereken|vergelijk|lijst|doorzoek|laad|laden|bewerk|vind"
        r"|begin|probeer|prober|roep|vervang|hernoem|verplaats|kopieer|bouw|ververs|zien"
        r"|tel\b|tellen|pak"
    ),
    idle=r"\b(?:niet|geen|nooit|altijd|wacht|heb\b|had\b|denk|geloof|hoop|weet\b|begrijp|ben\b"
    r"|kan\b|kon\b|zou\b|onthoud|rekening mee"
    r"|blijf|adviseer|raad|vermoed|laat het|leg .*uit|help|vind dat|hou|zeg|stel voor)",
    asks=r"\?|\b(?:als|zodra|wanneer|indien|mits|wil je|wilt u|voortaan|later|je kunt|u kunt"
    r"|zal ik"
    r"|laat (?:het )?me weten)\b",
)


NORDIC = language(
    future=r"(?:jag|jeg|eg) (?:ska|skal|skall|tänker|tenker|måste|må|vil|vill|kommer att)"
    r"|låt mig|la meg|lad mig|(?:ska|skal|måste|må|vil) (?:jag|jeg)"
    r"|(?:nästa|neste|næste|första|første) (?:steg|skridt|trin):?",
    opens=r"(?:jag|jeg|eg) (?:behöver|trenger)|(?:jag|jeg)(?= \w+r\b)"
    r"|\w+r (?:jag|jeg)\b|(?:nu|nå|först|først|så)(?= \w+r (?:jag|jeg))",
    acts=r"koll|sjekk|tjek|kontroll|läs|les|læs|titt|kig|\bse\b|ser på|öppn|åpn|åbn|kör|kjør"
    r"|kør|sök|søk"
    r"|søg|start|test|undersök|undersøk|undersøg|analys|ändr|endr|ændr|rett|ret\b|rätt|fix"
    r"|skriv|skap"
    r"|opret|opprett|tog bort|ta bort|slett|slet|installer|hämt|hent|ladd|last|beräkn|beregn"
    r"|jämför"
    r"|sammenlign|list|gå igenom|gå gjennom|gennemgå|prov|prøv|find|finn|hitt|börj|begyn|bygg"
    r"|anrop"
    r"|uppdater|oppdater|opdater|rett|räkn|tell",
    idle=r"\b(?:inte|ikke|inga|ingen|aldri|aldrig|alltid|altid|vänt|vent|har\b|hadde|havde|tror"
    r"|kom(?:mer)? ihåg|husk"
    r"|hopp|håp"
    r"|håb|vet\b|ved\b|förstår|forstår|är\b|er\b|kan\b|skulle|stann|rekommender|anbefal|föreslår"
    r"|foreslår"
    r"|förklar|forklar|hjälp|hjelp|hjælp|lämnar det|lar det|svar)",
    asks=r"\?|\b(?:om du|hvis|när du|når du|så snart|så snart du|vill du|vil du|i framtiden"
    r"|senare"
    r"|senere|du kan|skal jeg|ska jag .*\?|säg till|si fra|sig til|dersom|ifall)\b",
)
